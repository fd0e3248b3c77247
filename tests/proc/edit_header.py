#!/usr/bin/python3
"""Changes the header of a safetensors file for the bad-input tests: edit_header.py FILE HOW.

The file is written anew with the changed header before the same data, so that only the named thing is wrong.
"""
import json
import struct
import sys

path, how = sys.argv[1:3]
with open(path, "r+b") as f:
    (n,) = struct.unpack("<Q", f.read(8))
    text = f.read(n).decode()
    head = json.loads(text)
    names = [k for k in head if k != "__metadata__"]
    big = next(k for k in names if k.endswith("q_proj.weight") or k.endswith("q_a_proj.weight"))
    if how == "length":
        f.seek(0)
        f.write(struct.pack("<Q", 1 << 63))
        sys.exit()
    if how == "overlap":
        other = next(k for k in names if k != big and head[k]["data_offsets"][0] > 0)
        a, b = head[other]["data_offsets"]
        head[other]["data_offsets"] = [a - 2, b - 2]
    elif how == "beyond":
        a, b = head[big]["data_offsets"]
        head[big]["data_offsets"] = [a + (1 << 40), b + (1 << 40)]
    elif how == "dtype":
        head[big]["dtype"] = "I8"
        a, b = head[big]["data_offsets"]
        head[big]["shape"] = [head[big]["shape"][0], (b - a) // head[big]["shape"][0]]
    elif how == "shape":
        r, c = head[big]["shape"]
        head[big]["shape"] = [r * 2, c // 2]
    out = json.dumps(head, separators=(",", ":"))
    if how == "duplicate":
        twin = next(k for k in names if k != big and head[k] != head[big])
        out = out.replace('"%s":' % twin, '"%s":' % big, 1)
    if how == "json":
        out = out[:-1]
    out = out.ljust((len(out) + 7) // 8 * 8).encode()
    f.seek(8 + n)
    data = f.read()
    f.seek(0)
    f.truncate()
    f.write(struct.pack("<Q", len(out)) + out + data)
