"""A hub for the tests of k3-fetch, on two ports: the hub itself, and another host to which it redirects for large files.
fetch_server.py DIR LOG     serves the files of DIR as OWNER/NAME; prints the two ports
What goes wrong is said by the name of the repository:
  x/good      nothing
  x/drops     connections end after a random part of the body
  x/busy      the first request for a file is answered 429 with Retry-After, the second 503
  x/stall     the first body of each file stops in the middle and the connection stays open
  x/slow      50 kB in 50 ms
  x/norange   Range is ignored; the first body of each file ends in the middle
  x/shifted   ranges begin a byte late, once a file; the first body of each file ends in the middle
  x/changes   the first body of each file is another one, with another ETag, and ends in the middle
  x/wronghash the first two bodies of the last shard have a wrong byte
  x/wrong     every body of the last shard has a wrong byte
  x/longer    the first body of each file is longer than announced, and chunked
  x/shorter   the first body of each file is shorter than announced, and says so
  x/nosum     no ETag and no X-Linked-ETag
  x/names     the index names ../evil
  x/hugeindex the index is announced with 2^40 bytes
  x/gone      no shard 2
  x/secret    403 without a token
  x/leap      the hub redirects to http of a host that is not there
  moonshotai/Kimi-K3   announces the released sizes; KIMI_WRONG in LOG's directory: one of them wrong
LOG gets a line a request: port kind (hub, cdn), method, path, Range, If-Range, Authorization."""
import functools, hashlib, json, os, random, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

root, log_path = sys.argv[1:3]
lock, seen, ports = threading.Lock(), {}, {}
random.seed(7)
SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "LICENSE")


def kimi_size(n):
    one = {1: 2341216112, 93: 16567507176, 94: 4697664072, 95: 92289328, 96: 802448352}
    if n in one:
        return one[n]
    mla = n % 4 == 0
    return (16567501776 if mla else 16990911504) + (0 if n <= 10 else 5400 if mla else 5408)


def kimi_index():
    names = {}
    for n in range(1, 97):
        t = f"language_model.model.layers.{n - 1}.x" if n < 94 else "language_model.lm_head.weight" if n == 94 else f"vision_tower.{n}"
        names[t] = f"model-{n:05}-of-000096.safetensors"
    return json.dumps({"metadata": {"total_size": 1560860324864}, "weight_map": names}).encode()


@functools.lru_cache(None)
def sums(body):
    return hashlib.sha256(body).hexdigest(), hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest(), hashlib.md5(body).hexdigest()


@functools.lru_cache(None)
def content(repo, name):
    if repo == "moonshotai/Kimi-K3" and name.endswith(".index.json"):
        return kimi_index()
    if repo == "x/names" and name.endswith(".index.json"):
        return b'{"weight_map":{"a":"model-00001.safetensors","b":"../evil.safetensors"}}'
    if repo == "x/gone" and name.startswith("model-00002"):
        return None
    path = os.path.join(root, name)
    if "/" in name or not os.path.isfile(path):
        return None
    with open(path, "rb") as f:
        return f.read()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def kind(self):
        return "hub" if self.server.server_port == ports["hub"] else "cdn"

    def note(self):
        h = self.headers
        with lock, open(log_path, "a") as f:
            print(self.kind(), self.command, self.path, h.get("Range", "-"), h.get("If-Range", "-"), h.get("Authorization", "-"), file=f, flush=True)

    def count(self, key):
        with lock:
            seen[key] = seen.get(key, 0) + 1
            return seen[key]

    def reply(self, status, headers, body=b""):
        self.send_response(status)
        for k, v in headers:
            self.send_header(k, v)
        if not any(k in ("Content-Length", "Transfer-Encoding") for k, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.serve()

    def do_GET(self):
        self.serve()

    def serve(self):
        self.note()
        parts = self.path.lstrip("/").split("/")
        if self.kind() == "hub" and parts[0] != "cache":
            return self.hub("/".join(parts[:2]), parts[3], parts[4]) if len(parts) == 5 and parts[2] == "resolve" else self.reply(404, [])
        return self.body("/".join(parts[1:3]), parts[-1])

    def hub(self, repo, revision, name):
        if repo == "moonshotai/Kimi-K3" and name.startswith("model-"):
            size = kimi_size(int(name[6:11])) + (os.path.exists(os.path.join(os.path.dirname(log_path), "KIMI_WRONG")) and name[6:11] == "00050")
            return self.reply(302, [("X-Linked-Size", str(size)), ("X-Linked-ETag", '"%s"' % ("ab" * 32)), ("Location", "http://localhost/none")])
        body = content(repo, name)
        if repo == "x/hugeindex":
            return self.reply(302, [("X-Linked-Size", str(1 << 40)), ("X-Linked-ETag", '"%s"' % ("ab" * 32)), ("Location", "/cache/none")])
        if repo == "x/secret" and self.headers.get("Authorization") != "Bearer t0ken":
            return self.reply(403, [])
        if body is None:
            return self.reply(404, [("X-Error-Code", "EntryNotFound")])
        if repo == "x/busy":
            n = self.count((repo, name))
            if n == 1:
                return self.reply(429, [("Retry-After", "1")], b"slow down")
            if n == 2:
                return self.reply(503, [])
        commit = ("X-Repo-Commit", "c0ffee" + "0" * 34)
        if name in SMALL:
            return self.reply(307, [commit, ("Location", f"/cache/{repo}/{revision}/{name}")])
        to = f"http://127.0.0.1:{ports['cdn']}/cdn/{repo}/{name}" if repo != "x/leap" else "http://no-such-host.invalid/x"
        said = [commit, ("X-Linked-Size", str(len(body))), ("X-Linked-ETag", '"%s"' % sums(body)[0])]
        self.reply(302, (said if repo != "x/nosum" else said[:2]) + [("Location", to)], b"moved to another place")

    def body(self, repo, name):
        whole = content(repo, name)
        if whole is None:
            return self.reply(404, [])
        etag = '"%s"' % sums(whole)[1] if name in SMALL else '"cdn-%s"' % sums(whole)[2]
        n = self.count((repo, name, "body")) if self.command == "GET" else 0
        large = name.endswith(".safetensors")
        if large and repo == "x/changes" and n == 1:
            whole, etag = whole[::-1], '"older"'
        if name == LAST and (repo == "x/wrong" or (repo == "x/wronghash" and n <= 2)):
            whole = whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:]
        first, asked = 0, self.headers.get("Range")
        if asked and repo != "x/norange" and self.headers.get("If-Range", etag) == etag:
            first = int(asked[6:].rstrip("-"))
        if first > len(whole):
            return self.reply(416, [])
        part = whole[first:]
        headers = [("Content-Length", str(len(part)))] + ([] if repo == "x/nosum" else [("ETag", etag)])
        status = 200
        if first or (asked and repo != "x/norange" and self.headers.get("If-Range", etag) == etag):
            status = 206
            shown = first + (1 if repo == "x/shifted" and self.count((repo, name, "range")) == 1 else 0)
            headers.append(("Content-Range", f"bytes {shown}-{len(whole) - 1}/{len(whole)}"))
        if self.command == "HEAD" or not large:
            return self.reply(status, headers, part)
        self.trouble(repo, n, status, headers, part)

    def trouble(self, repo, n, status, headers, part):
        cut = len(part)
        if repo == "x/drops":
            cut = random.randint(1, 200000)
        elif repo in ("x/norange", "x/shifted", "x/changes", "x/stall") and n == 1:
            cut = len(part) // 2
        elif repo == "x/shorter" and n == 1:
            part = part[:-5]
            cut = len(part)
            headers[0] = ("Content-Length", str(cut))
        elif repo == "x/longer" and n == 1:
            headers[0] = ("Transfer-Encoding", "chunked")
            more = part + b"more"
            return self.reply(status, headers, b"%x\r\n%s\r\n0\r\n\r\n" % (len(more), more))
        self.reply(status, headers)
        try:
            if repo == "x/slow":
                for i in range(0, len(part), 50000):
                    self.wfile.write(part[i:i + 50000])
                    time.sleep(0.05)
            else:
                self.wfile.write(part[:cut])
            if repo == "x/stall" and n == 1:
                self.wfile.flush()
                time.sleep(600)
        except OSError:
            pass
        if cut < len(part):
            self.close_connection = True


LAST = max(n for n in os.listdir(root) if n.endswith(".safetensors"))
servers = []
for what in ("hub", "cdn"):
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.daemon_threads = True
    ports[what] = s.server_port
    servers.append(s)
print(ports["hub"], ports["cdn"], flush=True)
threading.Thread(target=servers[1].serve_forever, daemon=True).start()
servers[0].serve_forever()
