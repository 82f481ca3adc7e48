"""Each fault that stops a run is planted for real, found, and gone after its mend.

Example
    python -m pytest tests/test_doctor.py
"""
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import doctor
import plan
import pytest
from running import ROOT, make
from test_patches import site  # noqa: F401  (a fixture: a site-packages folder with an unpatched SGLang)


@pytest.fixture
def run(tiny, tmp_path):
    """run(model, *words): the commands that the doctor is asked about."""
    def ask(model=tiny, *words):
        words = [f"RUNS={tmp_path / 'runs'}", "TARGET=smollm2-135m", f"MODEL={model}", "PROMPTS=self:9", *words]
        return plan.read(make("-n", "all", *words).splitlines())
    return ask


@pytest.fixture
def model(tiny, tmp_path):
    """A copy of the target, to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def states(check, run):
    return [verdict for verdict, *_ in doctor.examine(check, run)]


def found(check, run):
    """The one failure: what is said and the mend."""
    (text, mend), = [line[1:] for line in doctor.examine(check, run) if line[0] == "fail"]
    assert text and mend
    return f"{text}; {mend}"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def mounted(tmp_path):
    """mounted(folder, size): a tmpfs there, of another size at the next call."""
    done = []

    def mount(folder, size):
        folder.mkdir(exist_ok=True)
        how = ["-o", f"remount,size={size}"] if folder in done else ["-t", "tmpfs", "-o", f"size={size}"]
        options = [*how, "tmpfs", folder]
        if subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("may not mount here")
        done.append(folder)
    yield mount
    for folder in set(done):
        subprocess.run(["umount", folder])


def test_a_disk_without_room(run, tiny, tmp_path, mounted):
    mounted(tmp_path / "runs", "6m")
    data = tmp_path / "runs" / "smollm2-135m" / "base"
    for name, done in (("01_generate", {"rows_in": 90, "rows_out": 90}),
                       ("02_prepare", {"rows_in": 90, "tokens": 20_000, "val_samples": 9})):
        (data / name).mkdir(parents=True)
        (data / name / "done.json").write_text(json.dumps(done))
    extract = {s: f for s, f in run().items() if s >= "03"}
    assert "states take 10.4 MB" in found(doctor.disk, extract)
    mounted(tmp_path / "runs", "960m")
    assert "KEEP_FREE" in found(doctor.disk, extract)  # room for the states, and not for what stays free
    mounted(tmp_path / "runs", "1100m")
    assert states(doctor.disk, extract) == ["ok", "ok", "ok"]
    (data / "02_prepare" / "done.json").unlink()
    assert states(doctor.disk, run()) == ["warn", "ok", "ok"]  # not known is not enough


def test_a_target_larger_than_the_memory(run, model):
    weights = model / "model-2.safetensors"
    weights.touch()
    os.truncate(weights, 1 << 43)  # 8 TiB, of which the disk holds nothing
    assert "the target takes 10.6 TB" in found(doctor.memory, run(model))
    weights.unlink()
    assert states(doctor.memory, run(model)) == ["ok"]


def test_a_file_of_the_future(run, tmp_path):
    done = tmp_path / "runs/smollm2-135m/base/01_generate/done.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    os.utime(done, (time.time() + 3600,) * 2)
    assert "touch" in found(doctor.disk, run())
    os.utime(done)
    assert "fail" not in states(doctor.disk, run())


def test_a_small_dev_shm(tiny, tmp_path):
    body = "import doctor; print([x[0] for x in doctor.examine(doctor.limits, dict(x=dict(model=str())))])"
    check = f"{sys.executable} -c '{body}'"
    script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && {check} && mount -o remount,size=50% /dev/shm && {check}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")})
    if not done.stdout:
        pytest.skip(f"may not mount here: {done.stderr}")
    assert done.stdout.split() == ["['fail',", "'ok']", "['ok',", "'ok']"]


def test_an_unpatched_sglang(run, site, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert "make patch" in found(doctor.programs, run())
    make("patch")
    assert states(doctor.programs, run())[0] == "ok"


def test_a_busy_port(run, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("PORT", str(listener.getsockname()[1]))
        assert "PORT" in found(doctor.port, run())
    assert states(doctor.port, run()) == ["ok"]


def test_a_template_without_an_assistant_turn(run, model):
    path = model / "chat_template.jinja"
    whole = path.read_text()
    path.write_text("{% for m in messages if m['role'] == 'user' %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% endfor %}")
    assert "can't be trained" in found(doctor.template, run(model))
    path.unlink()
    assert "no chat template" in found(doctor.template, run(model))
    path.write_text(whole.replace("<|im_end|>", "<|endoftext|>"))  # whose answers would never end
    assert "ends no turn" in found(doctor.template, run(model))
    path.write_text(whole)
    assert states(doctor.template, run(model)) == ["ok"]


@pytest.mark.parametrize("changes", [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": ["NobodysForCausalLM"]},
                                     {"model_type": "gemma"}, {"num_hidden_layers": 3}])
def test_a_target_that_cannot_be_extracted(run, model, changes):
    whole = (model / "config.json").read_text()
    edit(model / "config.json", **changes)
    found(doctor.target, run(model))
    (model / "config.json").write_text(whole)
    assert states(doctor.target, run(model)) == ["ok"]


def test_classes_that_inherit_the_capture_have_it():
    assert doctor.captures("LlamaForCausalLM") and doctor.captures("Phi3ForCausalLM")


def test_a_model_that_cannot_be_read(run, model):
    weights, config = model / "model.safetensors", model / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for spoil in (lambda: weights.write_bytes(whole[:-9]), weights.unlink, lambda: config.write_text("{"), config.unlink,
                  lambda: edit(config, model_type="nobodys")):
        spoil()
        assert str(model) in found(doctor.target, run(model))
        weights.write_bytes(whole)
        config.write_text(text)
        assert states(doctor.target, run(model)) == ["ok"]


def test_few_open_files(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        assert "ulimit" in found(doctor.limits, run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert states(doctor.limits, run()) == ["ok", "ok"]


def test_the_key_is_looked_for_and_not_shown(run, monkeypatch):
    asked = run()
    assert states(doctor.key, asked) == []
    asked["01_generate"] |= {"api": "http://127.0.0.1:9/v1", "api-model": "m"}
    monkeypatch.setenv("API_KEY", "canary-7f3a")
    assert "canary" not in str(doctor.examine(doctor.key, asked)) and states(doctor.key, asked) == ["ok", "warn"]
    monkeypatch.delenv("API_KEY")
    assert states(doctor.key, asked) == ["warn", "warn"]


@pytest.mark.slow
def test_a_failing_check_stops_all_before_its_first_stage(tiny, tmp_path):
    words = [f"RUNS={tmp_path / 'runs'}", f"MODEL={tiny}", "PROMPTS=self:9"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = {"PORT": str(listener.getsockname()[1])}
        text = make("all", *words, code=2, **busy)
        assert "\nfail  port" in text and "01_generate  " not in text and not (tmp_path / "runs").exists()
        assert "\nfail" in make("doctor", "FORCE=1", *words, **busy) and not (tmp_path / "runs").exists()
    assert "\nfail" not in make("doctor", *words)
