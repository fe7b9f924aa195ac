"""The calls in gpucoll/ that may wait, found in the syntax tree: each is a row "file function call"."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gpucoll"
HOME = "progress"  # the room where waits belong
# Names of methods and functions that wait, of any object
WAITS = {"wait", "wait_for", "acquire", "sleep", "synchronize", "deviceSynchronize", "select", "accept", "communicate",
         "flock", "lockf", "getaddrinfo", "create_connection", "becomes", "wait_for_all", "Barrier", "Wait", "Waitall",
         "waitpid", "urlopen", "run_forever", "Shrink"}
# Methods that wait if the object has one of these words in its name
OF_OBJECTS = {"recv": {"socket", "channel", "reader", "keeper"}, "connect": {"connected", "socket"},
              "check_output": {"subprocess"}, "run": {"subprocess"}, "poll": {"poll", "events"}, "put": {"queue"},
              **{name: {"mpi", "MPI", "wire", "ranks", "part"}
                 for name in ("allgather", "bcast", "gather", "barrier", "Dup", "Split", "Free", "Finalize")}}
# Methods that wait if called without an argument, or with a timeout; the first also if the object is a thread
SHORT = {"join", "result", "get", "exception"}


def places():
    """Return the rows of all calls that may wait, outside of `HOME`, each once."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(f"{HOME}/"):
            found |= dict.fromkeys(f"{name} {row}" for row in rows(ast.parse(path.read_text())))
    return list(found)


def rows(tree, inside=""):
    """Yield "function call" for each call below `tree` that may wait."""
    for node in ast.iter_child_nodes(tree):
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        within = f"{inside}.{node.name}".lstrip(".") if is_named else inside
        if isinstance(node, ast.Call) and may_wait(node):
            yield f"{within or 'module'} {ast.unparse(node.func)}"
        yield from rows(node, within)


def may_wait(call):
    """Return whether a call may wait, as far as its name and its arguments tell."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    options = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    first = getattr(call.args[0], "value", None) if call.args else None
    if options.get("blocking") is False or (name in ("acquire", "poll") and call.args and first in (False, 0)):
        return False
    if name in SHORT:
        of_text = isinstance(getattr(call.func, "value", None), ast.Constant | ast.JoinedStr)
        has_limit = "timeout" in options or (name == "join" and "thread" in owner)
        return owner not in ("", "sys") and not of_text and (has_limit or not (call.args or options))
    if name == "read":
        return owner == "os"
    if name in OF_OBJECTS:
        return any(word in owner for word in OF_OBJECTS[name])
    return name in WAITS


if __name__ == "__main__":
    print("\n".join(places()))
