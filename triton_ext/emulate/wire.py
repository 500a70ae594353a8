"""A program that runs on two hosts and measures the link between them with plain TCP sockets.

`wire.py listen ADDRESS SECONDS` prints its port; `wire.py connect ADDRESS PORT SECONDS` then starts the measurement.
Both print what they received, in bytes per second, as JSON.
"""

import json
import socket
import statistics
import struct
import sys
import threading
import time

_CHUNK_BYTES = 256 * 1024
_WARM_UP = 0.25  # part of the time that does not count: slow start, and what the link's burst lets through
_TIMEOUT_S = 10.0
_PINGS = 200
_PING_BYTES = 8


def _send_until_closed(connection: socket.socket) -> None:
    chunk = bytes(_CHUNK_BYTES)
    try:
        while True:
            connection.sendall(chunk)
    except (ConnectionError, TimeoutError):
        # The receiver has seen enough. What is still queued would take seconds on a slow link: drop it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def _receive(connection: socket.socket, seconds: float) -> float:
    """Bytes per second that arrive, after a time to warm up."""
    buffer = bytearray(_CHUNK_BYTES)
    start = mark = time.perf_counter()
    total = 0
    warm = False
    while True:
        count = connection.recv_into(buffer)
        now = time.perf_counter()
        if not count:
            raise ConnectionError("the sender ended early")
        total += count
        if not warm and now - start >= seconds * _WARM_UP:
            warm, mark, total = True, now, 0
        elif warm and now - start >= seconds:
            connection.close()
            return total / (now - mark)


def _ping(connection: socket.socket) -> float:
    """Seconds that a small message takes there and back: the median."""
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(bytes(_PING_BYTES))
        _receive_all(connection)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _echo(connection: socket.socket) -> None:
    for _ in range(_PINGS):
        _receive_all(connection)
        connection.sendall(bytes(_PING_BYTES))


def _receive_all(connection: socket.socket) -> None:
    missing = _PING_BYTES
    while missing:
        count = len(connection.recv(missing))
        if not count:
            raise ConnectionError("the peer ended early")
        missing -= count


def _both(outgoing: socket.socket, incoming: socket.socket, seconds: float) -> float:
    sender = threading.Thread(target=_send_until_closed, args=(outgoing,))
    sender.start()
    rate = _receive(incoming, seconds)
    sender.join()
    return rate


def _listen(address: str, seconds: float) -> dict[str, float]:
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)

        def accept() -> socket.socket:
            connection, _ = server.accept()
            return _prepared(connection)

        with accept() as connection:
            _echo(connection)
        with accept() as connection:
            one_way = _receive(connection, seconds)
        with accept() as incoming, accept() as outgoing:
            return {"one_way": one_way, "both_ways": _both(outgoing, incoming, seconds)}


def _connect(address: str, port: int, seconds: float) -> dict[str, float]:
    def connect() -> socket.socket:
        return _prepared(socket.create_connection((address, port), timeout=_TIMEOUT_S))

    with connect() as connection:
        round_trip = _ping(connection)
    with connect() as connection:
        _send_until_closed(connection)
    with connect() as outgoing, connect() as incoming:
        return {"round_trip": round_trip, "both_ways": _both(outgoing, incoming, seconds)}


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        result = _listen(sys.argv[2], float(sys.argv[3]))
    else:
        result = _connect(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    print(json.dumps(result), flush=True)
