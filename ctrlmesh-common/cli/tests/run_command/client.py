"""A client that knows kubeconfigs and nothing of us: asks for targets and prints each answer's status and body.

client.py [--kubeconfig=FILE] [--bare] [--wait] TARGET...

--bare leaves client certificates away, --wait asks for the next target only when a line comes in. A TARGET with a space
and JSON behind it is a POST of that.
"""
import base64, http.client, json, os, ssl, sys, tempfile, urllib.parse


def kubeconfig(path):
    with open(path) as file:
        config = json.load(file)
    named = lambda kind: {entry["name"]: entry[kind] for entry in config[kind + "s"]}
    context = named("context")[config["current-context"]]
    return named("cluster")[context["cluster"]], named("user").get(context.get("user"), {})


def connect(cluster, user, bare):
    trust = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=trust)
    if "client-certificate-data" in user and not bare:
        with tempfile.NamedTemporaryFile() as pem:
            for field in ("client-certificate-data", "client-key-data"):
                pem.write(base64.b64decode(user[field]))
            pem.flush()
            context.load_cert_chain(pem.name)
    server = urllib.parse.urlsplit(cluster["server"])
    return http.client.HTTPSConnection(server.hostname, server.port, context=context, timeout=20)


def say(*words):
    """Prints a line by one write, so that clients beside each other do not write into each other's lines."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main():
    path, bare, wait, targets = os.environ.get("KUBECONFIG"), False, False, []
    for argument in sys.argv[1:]:
        if argument.startswith("--kubeconfig="):
            path = argument.split("=", 1)[1]
        elif argument == "--bare":
            bare = True
        elif argument == "--wait":
            wait = True
        else:
            targets.append(argument)
    cluster, user = kubeconfig(path)
    headers = {"authorization": "Bearer " + user["token"]} if "token" in user else {}
    for target in targets:
        target, _, body = target.partition(" ")
        kind = {"content-type": "application/json"} if body else {}
        try:
            connection = connect(cluster, user, bare)
            connection.request("POST" if body else "GET", target, body or None, headers | kind)
            answer = connection.getresponse()
            say(answer.status, answer.read().decode())
        except (OSError, http.client.HTTPException) as error:
            say("error", type(error).__name__)
        if wait:
            sys.stdin.readline()


main()
