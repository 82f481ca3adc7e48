"""04_train as a process on a tiny target: tells what it does, refuses what it can't use, exports what it trained.

The states come from transformers, so no server is needed.
"""
import json
import subprocess

import pytest
from running import script

pytestmark = pytest.mark.slow
FLAGS = ["--draft-vocab", 200, "--epochs", 3, "--batch-tokens", 256, "--pack-tokens", 128, "--lr", "2e-3"]


def command(prepared, tiny, out):
    return ["scripts/04_train.py", "--tokens", prepared / "02_prepare", "--states", prepared / "03_extract", "--model", tiny,
            "--out", out, *FLAGS]


def train(prepared, tiny, out, code=0, **env):
    return script("04_train", *command(prepared, tiny, out)[1:], code=code, **env)


def numbers(out):
    """What must not depend on interruptions: every logged number but time and speed, and the exported bytes."""
    logged = [{k: v for k, v in json.loads(line).items() if k not in ("time", "tokens_per_s", "time_in")}
              for name in ("metrics", "validation") for line in (out / f"{name}.jsonl").read_text().splitlines()]
    return logged, (out / "sglang" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(prepared, tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "04_train"
    return train(prepared, tiny, out), out


def test_the_log_opens_with_what_will_be_done(undisturbed):
    output, out = undisturbed
    steps = json.loads((out / "done.json").read_text())["steps"]
    for wanted in (f"{steps} steps, 0 of them warm-up", "parameters trainable", "frozen", "rows,", "tokens to train on",
                   "starting from scratch", f"step {steps}/{steps}  100.0%"):
        assert wanted in output
    assert all(len(line) <= 200 and line[2] == ":" for line in output.splitlines()), output


def test_it_learns_and_logs_the_promised_fields(undisturbed):
    _, out = undisturbed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert set(rows[0]) >= {"step", "time", "loss", "acc", "lr", "tokens_per_s", "skipped"}
    assert set(rows[0]["time_in"]) == {"data", "forward", "backward", "communication", "optimizer"}
    assert sum(rows[0]["time_in"].values()) == pytest.approx(1, abs=0.01)
    assert len(rows[0]["acc"]) == 3
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (out / "curves.png").stat().st_size > 5000


def test_two_ranks_train_all_rows_and_speak_with_one_voice(undisturbed, prepared, tiny, tmp_path):
    output = train(prepared, tiny, tmp_path / "04_train", NPROC="2", OMP_NUM_THREADS="1")
    lines = [line for line in output.splitlines() if " 04_train " in line]
    assert sum("2 rank(s)" in line for line in lines) == 1
    assert sum("done: 30 rows in, 30 out" in line for line in lines) == 1
    one, two = (json.loads((out / "validation.jsonl").read_text().splitlines()[-1])
                for out in (undisturbed[1], tmp_path / "04_train"))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)


@pytest.mark.parametrize("name, value", [("NPROC", "0"), ("MICRO_TOKENS", "many"), ("NODE_RANK", "first")])
def test_a_machine_setting_that_is_no_number_is_refused(prepared, tiny, tmp_path, name, value):
    output = train(prepared, tiny, tmp_path / "04_train", code=2, **{name: value})
    assert f"refused: {name}={value}: wanted a number" in output and "Traceback" not in output


def test_states_of_other_tokens_are_refused(prepared, tiny, tmp_path):
    import shutil

    copy = tmp_path / "states"
    shutil.copytree(prepared / "03_extract", copy)
    shutil.copy(copy / "hs_3.safetensors", copy / "hs_4.safetensors")
    output = script("04_train", "--tokens", prepared / "02_prepare", "--states", copy, "--model", tiny, "--out", tmp_path / "out",
                    *FLAGS, code=2)
    assert "hs_4.safetensors is missing, cut off or holds states of other token ids" in output


def test_the_vocabulary_is_chosen_for_a_coverage_its_ceiling_printed_and_another_one_never_mixed_in(prepared, tiny, tmp_path):
    import vocab

    counts, out = vocab.load_counts(prepared / "02_prepare" / "token_freq.pt"), tmp_path / "out"
    size = vocab.size_for(counts, 0.9, [2])
    flags = [*command(prepared, tiny, out)[1:], "--epochs", 1, "--draft-coverage"]
    output = script("04_train", *flags, 0.9)
    assert f"draft vocabulary of {size} tokens covers 9" in output and "of the held-out ones: an acceptance length of at most " in output
    made = json.loads((out / "contract.json").read_text())["draft_vocab"]
    output = script("04_train", *flags, 0.8, code=2)
    assert "was made by another command" in output and json.loads((out / "contract.json").read_text())["draft_vocab"] == made
    output = script("04_train", *flags, 0.8, REDO="1")
    assert json.loads((out / "contract.json").read_text())["draft_vocab"] != made


def test_a_row_longer_than_a_pack_is_refused_before_training(prepared, tiny, tmp_path):
    output = script("04_train", "--tokens", prepared / "02_prepare", "--states", prepared / "03_extract", "--model", tiny,
                    "--out", tmp_path / "out", "--batch-tokens", 64, code=2)
    assert "raise --batch-tokens (and --pack-tokens, if it is set) or lower --max-seq-len" in output


def test_a_contract_of_another_target_is_refused(prepared, tiny, tmp_path):
    import shutil

    copy = tmp_path / "states"
    shutil.copytree(prepared / "03_extract", copy)
    record = json.loads((copy / "contract.json").read_text())
    (copy / "contract.json").write_text(json.dumps({**record, "last_state": "post-norm"}))
    output = script("04_train", "--tokens", prepared / "02_prepare", "--states", copy, "--model", tiny, "--out", tmp_path / "out",
                    *FLAGS, code=2)
    assert "says last_state = post-norm, but here it is pre-norm" in output


def test_a_full_disk_is_told_in_one_sentence_and_training_goes_on_when_there_is_room(undisturbed, prepared, tiny, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        output = train(prepared, tiny, small / "04_train", code=2)
        assert "refused: " in output and "No space left on device" in output and "Traceback" not in output
        subprocess.run(["mount", "-o", "remount,size=100m", small], check=True)
        train(prepared, tiny, small / "04_train")
        assert numbers(small / "04_train") == numbers(undisturbed[1])
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_draft_that_knows_the_whole_vocabulary_is_exported_with_maps(prepared, tiny, tmp_path):
    from safetensors.torch import load_file

    script("04_train", "--tokens", prepared / "02_prepare", "--states", prepared / "03_extract", "--model", tiny, "--out",
           tmp_path / "out", "--draft-vocab", 5000, "--epochs", 1, "--batch-tokens", 512)
    weights = load_file(tmp_path / "out" / "sglang" / "model.safetensors")
    assert len(weights["d2t"]) == 320 and not weights["d2t"].any() and weights["t2d"].all()


def test_states_in_fp8_are_read_at_their_true_size(prepared, tiny, tmp_path):
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8
    from safetensors.torch import load_file, save_file

    import packing
    import states
    import trainer

    for path in (prepared / "03_extract").glob("hs_*"):
        data = load_file(path)
        small, scales = quantize_tensor_to_fp8(data["hidden_states"])
        save_file({**data, "hidden_states": small, "hidden_states_scales": scales}, tmp_path / path.name)
        assert states.intact(tmp_path / path.name, data["token_ids"].tolist(), 64)
    read = [packing.Data(prepared / "02_prepare", where, 64, 512, 1, 0, trainer.Ranks()).samples
            for where in (prepared / "03_extract", tmp_path)]
    for row in range(5):
        exact, rounded = (samples[row] for samples in read)
        for name in ("hidden_states", "verifier_last_hidden_states"):
            assert 0 < (rounded[name] - exact[name]).norm() / exact[name].norm() < 0.05
