"""Faults that tests/mutation.py plants: the texts that it changes are there."""

from pathlib import Path

import mutation


def test_all_faults_can_be_planted():
    root = Path(mutation.__file__).parents[1]
    texts = {path: path.read_text() for folder in ("gpucoll", "kernels", "bench") for path in (root / folder).rglob("*")
             if path.is_file() and path.suffix in {".py", ".cu", ".h", ".cc", ".toml"}}
    gone = []
    for fault in mutation.faults():
        files = [root / fault.file] if fault.file else [path for path in texts if path.parent.name == "kernels"]
        gone += [(fault.name, old) for old, _ in fault.changes
                 if not any(texts[path].count(old) == 1 for path in files)]
    assert gone == []
