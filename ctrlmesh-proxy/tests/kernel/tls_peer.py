"""An operator that knows nothing of ctrlmesh: asks HOST:PORT over TLS, believing CA, for each path that it reads.

A line is a path, asked for on the connection that stands, or `+` and a path, on a new one, or `@HOST PATH`, on a new one
to another address. Answers each line by one of JSON.
"""
import errno, http.client, json, ssl, sys

host, port, ca = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)


class Connection(http.client.HTTPSConnection):
    """Believes that the API server is at `host`, wherever it is dialled."""

    def __init__(self, dial):
        super().__init__(host, int(port), context=context, timeout=30)
        self.dial, self.auto_open = dial, 0

    def connect(self):
        self.host = self.dial
        http.client.HTTPConnection.connect(self)
        self.sock = context.wrap_socket(self.sock, server_hostname=host)


connection = None
for line in sys.stdin:
    line, seen = line.strip(), {}
    try:
        if line[0] != "/" or connection is None:
            dial = line[1:].split()[0] if line[0] == "@" else host
            connection = Connection(dial)
            connection.connect()
        connection.request("GET", line[line.index("/"):])
        answer = connection.getresponse()
        seen = {"status": answer.status, "body": answer.read().decode()}
    except ssl.SSLError as error:
        seen = {"error": type(error).__name__}
    except OSError as error:
        seen = {"error": errno.errorcode.get(error.errno, type(error).__name__)}
    except http.client.HTTPException as error:
        seen = {"error": type(error).__name__}
    print(json.dumps(seen), flush=True)
