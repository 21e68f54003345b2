"""Sits at a terminal: starts a shell with job control in it, types, and waits for what is to appear.

terminal.py STEPS, a JSON list of {"type": text}, {"see": text} and {"stopped": true}. Fails when something does not
appear, or does not stop, in time.
"""
import json, os, pty, select, sys, time

PATIENCE = 60


def stopped(shell):
    """Whether the shell's session has other processes, and all of them are stopped."""
    states = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                state, _parent, _group, session = stat.read().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue  # It has ended.
        if int(session) == shell and int(name) != shell:
            states.append(state)
    return bool(states) and set(states) == {"T"}


def main():
    steps = json.loads(sys.argv[1])
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PS1"] = "> "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    seen, at = "", 0
    for step in steps:
        if "type" in step:
            os.write(terminal, step["type"].encode())
            continue
        deadline = time.monotonic() + PATIENCE
        if "stopped" in step:
            while not stopped(child):
                if time.monotonic() > deadline:
                    sys.exit(f"not all is stopped:\n{seen}")
                time.sleep(0.01)
            continue
        while step["see"] not in seen[at:]:
            ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                sys.exit(f"never saw {step['see']!r} in:\n{seen}")
            seen += os.read(terminal, 4096).decode(errors="replace")
        at = seen.index(step["see"], at) + len(step["see"])
    try:
        os.write(terminal, b"exit\n")
        while os.read(terminal, 4096):
            pass
    except OSError:
        pass  # Nobody is at the other end any more.
    os.waitpid(child, 0)
    print(seen)


main()
