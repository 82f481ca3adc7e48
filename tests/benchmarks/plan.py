"""Whether a plan after a probe is true: probe, plan and run one target, and compare each stage.

    python tests/benchmarks/plan.py                                  # the demo; half an hour on 2 quiet cores
    python tests/benchmarks/plan.py TARGET=mine PROMPTS=self:2000    # any settings of make

Works in a temporary folder (TMPDIR says where).  Prints truth / plan of each stage, and ends with 1 if one took over 30 % more or
less time than planned before the run, or the states over 2 % more or less disk than planned with the tokens that 02 counted.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


def main():
    def make(*words, **options):
        command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", f"RUNS={folder}/runs", *sys.argv[1:], *words]
        return subprocess.run(command, cwd=ROOT, check=True, text=True, **options)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        import plan
        import stage

        commands = plan.read(make("-n", "all", stdout=subprocess.PIPE).stdout.splitlines())
        make("plan", "PROBE=1")
        planned = plan.estimate(commands)
        make("all")
        os.environ["REDO"] = "1"  # a plan of the whole stage, as if it were to be run again
        again = plan.estimate({plan.EXTRACT: commands[plan.EXTRACT]})[plan.EXTRACT]
        wrong = False
        for name, given in commands.items():
            done = stage.done(given["out"])
            ratios = {"seconds": done["seconds"] / planned[name]["seconds"]}
            if name == plan.EXTRACT:
                ratios["bytes"] = done["bytes"] / planned[name]["bytes"]
                ratios["bytes, tokens counted"] = done["bytes"] / again["bytes"]
            print(f"{name:<12}", *(f"{k} {ratio:.3f} of the plan  " for k, ratio in ratios.items()), f"took {done['seconds']} s")
            wrong |= abs(ratios["seconds"] - 1) > 0.3 or abs(ratios.get("bytes, tokens counted", 1) - 1) > 0.02
    sys.exit(wrong)


if __name__ == "__main__":
    main()
