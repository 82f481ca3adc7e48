"""Say how many of a stage's hidden-state files are intact, by size and checksum.

Example
    python scripts/verify.py --states runs/try/03_extract --tokens runs/try/02_prepare

Reads   --states    03_extract: hs_{row}.safetensors, manifest-*.jsonl
        --tokens    02_prepare: how many rows there should be
Writes  nothing.  Exit 0: all are intact.  Exit 2: some are not, and how to make those again.
"""
from pathlib import Path

import progress
import stage
import states


def main():
    p = stage.arguments(__doc__)
    p.add_argument("--states", type=Path, required=True, help="03_extract's directory")
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    args = p.parse_args()
    total, found = stage.done(args.tokens)["samples"], {}
    progress.start(args.states / "none")  # no such directory: lines only, since progress.json is the stage's own
    progress.phase("verifying", total, "file")
    for row, what in states.Store(args.states, worker=None).look(range(total), verify=True):
        stage.check_stop()
        found.setdefault(what, []).append(row)
        progress.advance()
    said = f"{len(found.pop('whole', ()))} of {total} files are whole"
    for what, rows in sorted(found.items()):
        said += f"; {what} {len(rows)}: {', '.join(map(str, rows[:20]))}{' ...' * (len(rows) > 20)}"
    if found:
        raise stage.Refused(f"{said}.  To make these again: delete done.json, then `make extract VERIFY=1`")
    progress.log(said)


if __name__ == "__main__":
    stage.run(main)
