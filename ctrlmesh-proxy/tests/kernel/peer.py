"""A client or a proxy that knows nothing of ctrlmesh: plain sockets. Prints what it saw as JSON lines."""
import ctypes, errno, json, mmap, os, select, socket, struct, subprocess, sys, threading, time

FAST_OPEN = 0x20000000


def name(address):
    return "[%s]:%d" % address[:2] if ":" in address[0] else "%s:%d" % address[:2]


def by_uring(sock, address):
    """connect() through io_uring, by hand: one entry in, one out."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = (ctypes.c_uint32 * 30)()
    ring = libc.syscall(425, 4, params)
    assert ring >= 0, os.strerror(ctypes.get_errno())
    sq, cq = params[10:18], params[20:28]
    size = max(sq[6] + params[0] * 4, cq[5] + params[1] * 16)
    rings, entries = mmap.mmap(ring, size), mmap.mmap(ring, params[0] * 64, offset=0x10000000)
    if sock.family == socket.AF_INET6:
        raw = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", address[1], 0) + socket.inet_pton(socket.AF_INET6, address[0]) + bytes(4)
    else:
        raw = struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + socket.inet_aton(address[0]) + bytes(8)
    sockaddr = ctypes.create_string_buffer(raw, len(raw))
    entries[:64] = struct.pack("=BBHiQQIIQ24x", 16, 0, 0, sock.fileno(), len(raw), ctypes.addressof(sockaddr), 0, 0, 7)
    struct.pack_into("=I", rings, sq[6], 0)
    struct.pack_into("=I", rings, sq[1], 1)
    assert libc.syscall(426, ring, 1, 1, 1, None, 0) == 1, os.strerror(ctypes.get_errno())
    user, result = struct.unpack_from("=Qi", rings, cq[5])
    assert user == 7
    if result < 0:
        raise OSError(-result, os.strerror(-result))


def patient(sock):
    """Limits every call; `settimeout` would make the socket non-blocking."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 10, 0))


def connect(sock, address, how):
    if how == "uring":
        by_uring(sock, address)
    elif how == "nonblocking":
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            select.select([], [sock], [], 10)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.setblocking(True)
    elif how == "fastopen":
        sock.sendto(b"hello\n", FAST_OPEN, address)
    elif how == "fastopenconnect":
        sock.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT: with a cookie, the SYN leaves with the data
        sock.connect(address)
        sock.sendall(b"hello\n")
    else:
        sock.connect(address)


def once(host, port, how="blocking"):
    """One connection: what the client sees of it. `how` is one way to connect, or several joined by `+`."""
    ways, how = how.split("+"), how.split("+")[-1]
    options = dict(way.split("=", 1) for way in ways if "=" in way)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    seen = {}
    with socket.socket(family, socket.SOCK_STREAM, 262 if "mptcp" in ways else 0) as sock:
        patient(sock)
        if "v6only" in ways:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        elif family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if "bound" in ways:
            sock.bind(("", 0))
        if "device" in options:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, options["device"].encode())
        if "source" in options:
            sock.bind((options["source"], 0))
        start = time.perf_counter()
        try:
            connect(sock, (host, int(port)), how)
            # First, because after a SYN with data the socket may not be connected yet.
            seen["answer"] = sock.makefile().readline().strip()
            seen["peer"] = name(sock.getpeername())
            seen["local"] = name(sock.getsockname())
        except OSError as error:
            seen["error"] = errno.errorcode.get(error.errno, str(error))
        seen["ms"] = (time.perf_counter() - start) * 1000
    return seen


def in_thread(host, port):
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(once(host, port))) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return seen


def by_fork(host, port):
    command = [sys.executable, sys.argv[0], "once", host, port]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def twice(host, port):
    """Two attempts on one socket, the second after a line on stdin."""
    seen = []
    with socket.socket() as sock:
        for attempt in range(2):
            try:
                sock.connect((host, int(port)))
                seen.append({"peer": name(sock.getpeername()), "answer": sock.makefile().readline().strip()})
            except OSError as error:
                seen.append({"error": errno.errorcode[error.errno]})
            if attempt == 0:
                print("once", flush=True)
                sys.stdin.readline()
    return seen


def hold(host, port, count):
    """So many connections at once; after a line on stdin, what comes in on each."""
    socks = [socket.create_connection((host, int(port)), 10) for _ in range(int(count))]
    print("holding", flush=True)
    seen = []
    while sys.stdin.readline():
        for sock in socks:
            patient(sock)
            seen.append({"peer": name(sock.getpeername()), "answer": sock.makefile().readline().strip()})
        print(json.dumps(seen), flush=True)
    return seen


def datagram(host, port):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        patient(sock)
        sock.connect((host, int(port)))
        sock.send(b"hello")
        return {"answer": sock.recv(200).decode(), "peer": name(sock.getpeername())}


def hammer(host, port, expected):
    """Connects until stdin ends. Direct is a connection whose own name is the one that the target saw; proxied is one
    whose answer begins as expected. Any other answer is broken."""
    counts = {"proxied": 0, "direct": 0, "refused": 0, "broken": 0, "errors": {}}
    first = True
    while not select.select([sys.stdin], [], [], 0)[0]:
        with socket.socket() as sock:
            patient(sock)
            try:
                sock.connect((host, int(port)))
                local = name(sock.getsockname())
                answer = sock.makefile().readline()
            except ConnectionRefusedError:
                counts["refused"] += 1
                continue
            except (ConnectionResetError, BrokenPipeError):
                counts["broken"] += 1
                continue
            except OSError as error:
                code = errno.errorcode.get(error.errno, str(error))
                counts["errors"][code] = counts["errors"].get(code, 0) + 1
                continue
            if first:
                first = print("connected", flush=True)
            if not answer.endswith("\n"):
                counts["broken"] += 1
            elif answer == "target %s\n" % local:
                counts["direct"] += 1
            elif answer.startswith(expected):
                counts["proxied"] += 1
            else:
                counts["broken"] += 1
    return counts


def original(sock):
    """SO_ORIGINAL_DST as the world's proxies ask for it."""
    for level, size in ((socket.SOL_IP, 16), (socket.IPPROTO_IPV6, 28)):
        try:
            raw = sock.getsockopt(level, 80, size)
        except OSError:
            continue
        port = struct.unpack("!H", raw[2:4])[0]
        if struct.unpack("=H", raw[:2])[0] == socket.AF_INET:
            return "%s:%d" % (socket.inet_ntoa(raw[4:8]), port)
        return "[%s]:%d" % (socket.inet_ntop(socket.AF_INET6, raw[8:24]), port)
    return "unknown"


def proxy(port):
    """Accepts and says where the client wanted to go."""
    with socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128) as server:
        server.setsockopt(socket.IPPROTO_TCP, 23, 16)  # TCP_FASTOPEN
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            with client:
                patient(client)
                client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # as event loops do; nobody's business
                client.sendall(("proxy %s\n" % original(client)).encode())
                client.shutdown(socket.SHUT_WR)
                while client.recv(200):  # what a SYN carried, lest closing reset the connection
                    pass


command, arguments = sys.argv[1], sys.argv[2:]
run = {"once": once, "thread": in_thread, "fork": by_fork, "twice": twice, "hold": hold, "datagram": datagram, "hammer": hammer, "proxy": proxy}
print(json.dumps(run[command](*arguments)), flush=True)
