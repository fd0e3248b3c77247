"""What curl cannot be told to do: many requests in one process, and clients that behave badly.
http_client.py ADDR:PORT refused            < lines STATUS<tab>PARAM<tab>PATH<tab>BODY: each must be refused so
http_client.py ADDR:PORT many N PATH        < one body a line, in turn: N at once; prints status and body, one JSON a line
http_client.py ADDR:PORT drip head|body S   sends a byte every 0.2 s; prints the seconds until it is cut, at most S
http_client.py ADDR:PORT sip PATH BODY S    a stream of which a byte is read every 0.05 s for S seconds, then the rest
http_client.py ADDR:PORT deaf PATH BODY S   a stream that is not read; prints the seconds until it is cut, at most S
http_client.py - stamp                      < lines: each with the time at which it came
http_client.py ADDR:PORT proxy S             a proxy that cuts what is silent for S seconds; prints its address
http_client.py ADDR:PORT idle N             opens N connections, says so, and waits for a line on stdin"""
import http.client, json, select, socket, sys, threading, time

host, port = (sys.argv[1].removeprefix("http://") + ":0").split(":")[:2]
what, args = sys.argv[2], sys.argv[3:]


def post(path, body):
    c = http.client.HTTPConnection(host, int(port), timeout=300)
    c.request("POST", path, body.encode(), {"Content-Type": "application/json"})
    r = c.getresponse()
    return r.status, r.read().decode()


def request(path, body):
    return (f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n" + body).encode()


def connect(small=False):
    s = socket.socket()
    if small:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect((host, int(port)))
    return s


def refused():
    bad = n = 0
    for line in sys.stdin.read().splitlines():
        status, param, path, body = line.split("\t")
        got, text = post(path, body)
        n += 1
        try:
            e = json.loads(text)["error"]
            good = got == int(status) and (e["param"] or "null") == param and e["message"] and sorted(e) == ["code", "message", "param", "type"]
        except (ValueError, KeyError):
            good = False
        if not good:
            bad += 1
            print(line, "->", got, text)
    print(n, "asked,", bad, "wrong")
    return bad or not n


def many(n, path):
    bodies, out, lock = sys.stdin.read().splitlines(), [], threading.Lock()

    def one(i):
        r = post(path, bodies[i % len(bodies)])
        with lock:
            out.append({"i": i, "status": r[0], "body": r[1]})

    threads = [threading.Thread(target=one, args=(i,)) for i in range(int(n))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for o in out:
        print(json.dumps(o))


def drip(part, limit):
    s = connect()
    text = request("/v1/completions", "x" * 100000)
    start = time.time()
    if part == "body":
        head = text.index(b"\r\n\r\n") + 4
        s.sendall(text[:head])
        text = text[head:]
    for b in text:
        if time.time() - start > float(limit):
            break
        try:
            s.sendall(bytes([b]))
        except OSError:
            break
        if select.select([s], [], [], 0.2)[0] and not s.recv(4096):
            break
    print("%.1f" % (time.time() - start))


def sip(path, body, seconds):
    s = connect(small=True)
    s.sendall(request(path, body))
    got, until = b"", time.time() + float(seconds)
    while time.time() < until:
        got += s.recv(1)
        time.sleep(0.05)
    print(len(got), file=sys.stderr)
    while not got.endswith(b"0\r\n\r\n"):
        more = s.recv(65536)
        if not more:
            break
        got += more
    sys.stdout.buffer.write(got)


def deaf(path, body, limit):
    s = connect(small=True)
    s.sendall(request(path, body))
    start = time.time()
    p = select.poll()
    p.register(s, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    p.poll(float(limit) * 1000)
    print("%.1f" % (time.time() - start))


def stamp():
    for line in sys.stdin:
        print("%.6f %s" % (time.time(), line.rstrip("\r\n")), flush=True)


def forward(client, silence):
    server = connect()
    last = time.time()
    while time.time() - last < silence:
        for s in select.select([client, server], [], [], 0.1)[0]:
            data = s.recv(65536)
            if not data:
                client.close()
                server.close()
                return
            (server if s is client else client).sendall(data)
            if s is server:
                last = time.time()
    print("cut after", silence, "s of silence", flush=True)
    client.shutdown(socket.SHUT_RDWR)
    server.close()


def proxy(silence):
    listening = socket.create_server(("127.0.0.1", 0))
    print("http://127.0.0.1:%d" % listening.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=forward, args=(listening.accept()[0], float(silence)), daemon=True).start()


def idle(n):
    all_of_them = [connect() for _ in range(int(n))]
    print("open", len(all_of_them), flush=True)
    sys.stdin.readline()


sys.exit({"refused": refused, "many": many, "drip": drip, "sip": sip, "deaf": deaf, "idle": idle, "proxy": proxy, "stamp": stamp}[what](*args))
