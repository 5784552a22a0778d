"""What pytest-xdist starts as a worker's Python: `worker_door.py SOCKET -u -c CODE`. It hands its standard streams
to the process that forks workers (`forked_workers.py`) and waits until the worker has ended."""

import os
import signal
import socket
import sys

address, *options = sys.argv[1:]
line = socket.socket(socket.AF_UNIX)
try:
    line.connect(address)
    socket.send_fds(line, [options[-1].encode()], [0, 1, 2])
    taken = line.recv(1)
except OSError:
    taken = b""
if not taken:
    os.execv(sys.executable, [sys.executable, *options])
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker has it, too, and decides
for number in (0, 1):
    os.close(number)
line.recv(1)
