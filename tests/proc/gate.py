"""gate.py FIFO ROOM OUT: holds a writer to FIFO up after ROOM bytes, until SIGUSR1; then copies what it writes to OUT.

So a test can act in the middle of an answer however fast or slow the machine is.  Prints "ready" once the writer may start."""
import fcntl
import os
import signal
import sys

fifo, room, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.mkfifo(fifo, 0o600)
both = os.open(fifo, os.O_RDWR)
size = fcntl.fcntl(both, 1031, 4096)  # F_SETPIPE_SZ: one page
fill = size - room
os.write(both, b'x' * fill)
print('ready', flush=True)
signal.sigwait([signal.SIGUSR1])
reader = os.open(fifo, os.O_RDONLY)
os.close(both)
with open(out, 'wb') as f:
    while block := os.read(reader, 65536):
        f.write(block[min(fill, len(block)):])
        fill -= min(fill, len(block))
