"""Apply the two-line hidden-states patch to the SGLang of this Python, or say why not.

Example
    python patches/apply.py            # apply; a second run says that it is applied
    python patches/apply.py --check    # say whether it is applied; change nothing

Reads   patches/sglang-hidden-states.patch              its one hunk, the only copy of the two lines
Writes  sglang/srt/model_executor/hook_manager.py       in site-packages, by rename

Exit 0: applied.  Exit 2: not applied, with one sentence that says why; the file is as it was.
"""
import argparse
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PATCH = Path(__file__).resolve().parent / "sglang-hidden-states.patch"
TESTED = ("0.5.16", "0.5.23")  # versions that were run with the hooks, and not only patched


def refuse(sentence):
    print(sentence, file=sys.stderr)
    sys.exit(2)


def read_hunk():
    """The patched file's path below site-packages, and the hunk's text before and after the patch."""
    header, hunk = PATCH.read_text(encoding="utf-8").split("\n@@ ", 1)
    path = header.rsplit("\n+++ b/", 1)[1]
    lines = hunk.splitlines(keepends=True)[1:]
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    return path, before, after


def replace(file, text):
    """Write by rename, which also spares a package manager's cache where the installed file is a hard link into it."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".hook_manager-")
    try:
        with open(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        shutil.copymode(file, temporary)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def main(args):
    # The metadata answers without importing sglang, which takes seconds and may want a GPU.
    search = [args.site] if args.site else sys.path
    sglang = next(iter(metadata.distributions(name="sglang", path=search)), None)
    if sglang is None:
        refuse(f"SGLang is not installed in {args.site or sys.prefix}; run `make setup`.")
    if sglang.version not in TESTED:
        refuse(f"SGLang is {sglang.version}, the patch is tested with {' and '.join(TESTED)} only; install that.")
    path, before, after = read_hunk()
    file = Path(sglang.locate_file(path))
    if not file.is_file():
        refuse(f"SGLang {sglang.version} has no file {file}; install it from its wheel.")
    with open(file, encoding="utf-8", newline="") as stream:  # newline="": every other byte of the file stays as it is
        text = stream.read()

    if text.count(after) == 1 and before not in text:
        print(f"The hidden-states patch is applied to SGLang {sglang.version} ({file}).")
    elif text.count(before) != 1 or after in text:
        refuse(f"{file} is neither SGLang's own nor the patched one and was left alone; "
               f"reinstall sglang=={sglang.version}.")
    elif args.check:
        refuse(f"SGLang {sglang.version} lacks the hidden-states patch; run `make patch`.")
    else:
        try:
            replace(file, text.replace(before, after))
        except OSError as error:
            refuse(f"{file} can't be patched: {error.strerror}.")
        print(f"Applied the hidden-states patch to SGLang {sglang.version} ({file}); running servers need a restart.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 2 where the patch is missing")
    parser.add_argument("--site", metavar="DIR", help="a site-packages folder other than this Python's")
    main(parser.parse_args())
