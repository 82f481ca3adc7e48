"""The SGLang patch and the hook that it serves, without a server: copies of site-packages, small torch modules.

Example
    python -m pytest tests/test_patches.py
"""
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import deserialize, safe_open
from safetensors.torch import save_file

PATCHES = Path(__file__).resolve().parent.parent / "patches"
sys.path.insert(0, str(PATCHES))  # as the launcher does for the server
import hidden_states_hook as hook  # noqa: E402

TARGET = "sglang/srt/model_executor/hook_manager.py"
ADDED = [line[1:] for line in (PATCHES / "sglang-hidden-states.patch").read_text().splitlines(keepends=True)
         if re.match(r"\+(?!\+\+)", line)]
H, LAYERS = 8, [2, 5, 7]


# --- apply.py ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def site(tmp_path):
    """A site-packages folder with the installed SGLang's metadata and its hook_manager.py, unpatched."""
    try:
        sglang = metadata.distribution("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("SGLang is not installed")
    target = tmp_path / "site" / TARGET
    target.parent.mkdir(parents=True)
    text = Path(sglang.locate_file(TARGET)).read_text()
    target.write_text(text.replace("".join(ADDED), ""))
    target.chmod(0o640)
    write_version(tmp_path / "site", sglang.version)
    return tmp_path / "site"


def write_version(site, version):
    for old in site.glob("sglang-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


def apply(site, *flags):
    run = subprocess.run([sys.executable, PATCHES / "apply.py", "--site", site, *flags], capture_output=True, text=True)
    assert "Traceback" not in run.stderr
    return run.returncode, run.stdout + run.stderr


def snapshot(site):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in site.rglob("*") if path.is_file()}


def test_a_pristine_tree_is_patched_once_and_only_by_the_two_lines(site):
    before = (site / TARGET).read_text()
    assert apply(site)[0] == 0
    after = (site / TARGET).read_text()
    assert len(ADDED) == 2 and after.replace("".join(ADDED), "") == before and after != before
    assert (site / TARGET).stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (site / TARGET).parent.iterdir()] == ["hook_manager.py"]
    patched = snapshot(site)
    code, said = apply(site)
    assert code == 0 and "is applied" in said and snapshot(site) == patched


def test_check_changes_nothing(site):
    pristine = snapshot(site)
    code, said = apply(site, "--check")
    assert code == 2 and "make patch" in said and snapshot(site) == pristine
    apply(site)
    assert apply(site, "--check")[0] == 0


def test_a_hard_link_to_a_package_cache_keeps_its_text(site, tmp_path):
    os.link(site / TARGET, tmp_path / "cached.py")
    pristine = (tmp_path / "cached.py").read_text()
    assert apply(site)[0] == 0 and (tmp_path / "cached.py").read_text() == pristine


@pytest.mark.parametrize("change", [
    lambda text: text.replace("hook_factory = resolve_callable(hook_factory_path)", "hook_factory = resolve(path)"),
    lambda text: text + text,                                        # the place is there twice
    lambda text: text.replace("        hook = hook_factory", ADDED[0] + "        hook = hook_factory"),  # half patched
    lambda text: "",
])
def test_an_unknown_file_is_left_alone_with_one_sentence(site, change):
    (site / TARGET).write_text(change((site / TARGET).read_text()))
    unknown = snapshot(site)
    code, said = apply(site)
    assert code == 2 and "left alone" in said and said.count("\n") == 1 and snapshot(site) == unknown


@pytest.mark.parametrize("version", ["0.5.9", "0.5.24", "0.5.23.post1"])
def test_an_untested_version_is_refused_by_name(site, version):
    write_version(site, version)
    pristine = snapshot(site)
    code, said = apply(site)
    assert code == 2 and version in said and "0.5.16 and 0.5.23" in said and snapshot(site) == pristine


def test_a_missing_sglang_or_file_is_said(site, tmp_path):
    code, said = apply(tmp_path / "nothing")
    assert code == 2 and "not installed" in said
    (site / TARGET).unlink()
    code, said = apply(site)
    assert code == 2 and "no file" in said


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the patch program")
def test_the_patch_program_makes_the_same_file(site, tmp_path):
    other = shutil.copytree(site, tmp_path / "other")
    apply(site)
    with open(PATCHES / "sglang-hidden-states.patch") as diff:
        subprocess.run(["patch", "-p1", "-F0", "-d", other], stdin=diff, check=True, capture_output=True)
    assert (other / TARGET).read_text() == (site / TARGET).read_text()


# --- the hook: a batch in, files out ----------------------------------------------------------------------------------

class Norm(torch.nn.Module):
    def forward(self, states, residual=None):
        return states if residual is None else (states, states + residual)


class Logits(torch.nn.Module):
    def forward(self, ids, states, head, batch, aux=None):
        return None


class Target(torch.nn.Module):
    """Stands for a SGLang model: the two modules and the switch, with the id arithmetic of the model named."""

    def __init__(self, arithmetic=lambda ids: [i + 1 for i in ids]):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.norm = Norm()
        self.model.layers_to_capture = []
        self.logits_processor = Logits()
        self.arithmetic = arithmetic

    def set_eagle3_layers_to_capture(self, ids=None):
        self.model.layers_to_capture = self.arithmetic(ids)


@pytest.fixture
def target(tmp_path):
    model = Target()
    model.out = tmp_path / "out"
    model.model.norm.register_forward_hook(hook.final_norm({"model": model}))
    model.writer = hook.Writer(model.out, {"layer_ids": json.dumps(LAYERS)}, patience=0.3)
    model.dump = hook.Dump(model.writer, len(LAYERS))
    model.logits_processor.register_forward_hook(model.dump)
    yield model
    hook._pre_norm.clear()


def written(model):
    """Wait until the writer's threads have done what they were given."""
    for thread in model.writer.threads:
        thread.submit(int).result(timeout=60)


def random_states(num_rows, layers=len(LAYERS)):
    return torch.randint(1000, (num_rows,)), torch.randn(num_rows, layers + 1, H)


def forward(model, requests, ids, states, form="list", extend=True):
    """One forward of the server.  requests: (rid, rows, start), ids [N], states [N, K + 1, H]: captured layers, last."""
    batch = SimpleNamespace(rids=[r[0] for r in requests], extend_seq_lens_cpu=[r[1] for r in requests],
                            extend_prefix_lens_cpu=[r[2] for r in requests],
                            forward_mode=SimpleNamespace(is_extend=lambda: extend))
    aux = list(states[:, :-1].unbind(1))
    aux = {"list": aux, "packed": torch.cat(aux, -1), "list of packed": [torch.cat(aux, -1)], "none": None}[form]
    last = states[:, -1]
    model.model.norm(last / 4, last - last / 4)  # their sum is the last state before the norm
    model.logits_processor(ids, last, None, batch, aux)


def read(model, rid):
    written(model)
    with safe_open(model.out / f"{rid}.safetensors", "pt") as file:
        return file.get_tensor("token_ids"), file.get_tensor("hidden_states"), file.metadata()


def check(model, rid, ids, states):
    got_ids, got, _ = read(model, rid)
    assert got_ids.dtype == torch.int64 and got.dtype == torch.bfloat16
    assert torch.equal(got_ids, ids) and got.shape == states.shape
    torch.testing.assert_close(got.float(), states, atol=0, rtol=2 ** -8)


def files(model):
    written(model)
    return sorted(path.name for path in model.out.iterdir())


@pytest.mark.parametrize("form", ["list", "packed", "list of packed"])
def test_a_batch_is_cut_into_its_requests(target, form):
    ids, states = random_states(12)  # two requests, a stranger between them, padding behind
    forward(target, [("hs-3-4-0", 4, 0), ("stranger", 2, 0), ("hs-4-5-1", 5, 0)], ids, states, form)
    check(target, "hs-3-4-0", ids[:4], states[:4])
    check(target, "hs-4-5-1", ids[6:11], states[6:11])
    assert files(target) == ["hs-3-4-0.safetensors", "hs-4-5-1.safetensors"]
    assert json.loads(read(target, "hs-3-4-0")[2]["layer_ids"]) == LAYERS


def test_chunks_are_joined_in_order_and_the_file_comes_with_the_last(target):
    ids, states = random_states(10)
    for start, end in (0, 4), (4, 8), (8, 10):
        assert not any(name.endswith(".safetensors") for name in files(target))
        forward(target, [("hs-0-10-0", end - start, start)], ids[start:end], states[start:end])
    check(target, "hs-0-10-0", ids, states)


def test_a_norm_without_residual_gives_its_input(target):
    ids, states = random_states(3)
    target.model.norm(states[:, -1])
    batch = SimpleNamespace(rids=["hs-0-3-0"], extend_seq_lens_cpu=[3], extend_prefix_lens_cpu=[0],
                            forward_mode=SimpleNamespace(is_extend=lambda: True))
    target.logits_processor(ids, None, None, batch, list(states[:, :-1].unbind(1)))
    check(target, "hs-0-3-0", ids, states)


def test_a_later_change_of_the_servers_buffers_does_not_reach_the_file(target):
    ids, states = random_states(6)
    buffer_ids, buffer = ids.clone(), states.clone()
    forward(target, [("hs-0-6-0", 3, 0)], buffer_ids[:3], buffer[:3])
    buffer_ids[:3] = buffer[:3] = 0
    forward(target, [("hs-0-6-0", 3, 3)], buffer_ids[3:], buffer[3:])
    check(target, "hs-0-6-0", ids, states)


def test_a_file_holds_its_request_and_not_the_batch(target):
    ids, states = random_states(5000)
    forward(target, [("stranger", 4990, 0), ("hs-0-10-0", 10, 0)], ids, states)
    written(target)
    assert (target.out / "hs-0-10-0.safetensors").stat().st_size < 10 * 4 * H * 2 + 10 * 8 + 1000


def test_tokens_of_an_unfinished_prompt_are_on_disk_and_not_in_memory(target):
    ids, states = random_states(5000)
    forward(target, [("hs-0-20-0", 10, 0), ("stranger", 4990, 0)], ids, states)
    assert len(files(target)) == 1 and files(target)[0].endswith(".tmp")
    assert target.writer.free.qsize() == hook.SLOTS


def test_a_prompt_longer_than_a_slot_of_the_ring_goes_through_it_in_pieces(target, monkeypatch):
    monkeypatch.setattr(hook, "SLOT", 7 * (12 + 4 * H * 2))
    ids, states = random_states(50)
    forward(target, [("hs-0-50-0", 40, 0)], ids[:40], states[:40])
    forward(target, [("hs-0-50-0", 10, 40)], ids[40:], states[40:])
    check(target, "hs-0-50-0", ids, states)


def test_a_file_is_that_of_safetensors_own_writer_to_the_reader(target, tmp_path):
    ids, states = random_states(5)
    forward(target, [("hs-0-5-0", 5, 0)], ids, states)
    got_ids, got, metadata = read(target, "hs-0-5-0")
    save_file({"token_ids": got_ids, "hidden_states": got}, tmp_path / "theirs", metadata)
    assert len(deserialize((target.out / "hs-0-5-0.safetensors").read_bytes())) == 2
    assert dict(deserialize((target.out / "hs-0-5-0.safetensors").read_bytes())) == dict(deserialize((tmp_path / "theirs").read_bytes()))


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9)], ids=["whole", "in chunks"])
def test_fp8_is_the_layout_and_the_arithmetic_of_hs_connectors(target, cuts):
    from hs_connectors import FP8Transfer
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    ids, states = random_states(9)
    for a, b in zip(cuts, cuts[1:]):
        forward(target, [("hs8-0-9-0", b - a, a)], ids[a:b], states[a:b])
    written(target)
    wanted, scales = quantize_tensor_to_fp8(states.bfloat16())
    with safe_open(target.out / "hs8-0-9-0.safetensors", "pt") as file:
        assert set(file.keys()) == {"token_ids", "hidden_states", "hidden_states_scales"}
        assert file.get_tensor("hidden_states").dtype == torch.float8_e4m3fn
        assert torch.equal(file.get_tensor("hidden_states").view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(file.get_tensor("hidden_states_scales"), scales)
        assert torch.equal(file.get_tensor("token_ids"), ids)
    (target.out / "hs8-0-9-0.safetensors").rename(target.out / "hs_0.safetensors")
    read_back = FP8Transfer(target.out).get_cached(0)["hidden_states"]
    assert read_back.dtype == torch.bfloat16 and 0 < ((read_back - states).norm() / states.norm()) < 0.04


def held(model):
    """Keep the writer's threads from writing, as a slow disk does; returns the event that lets them go."""
    go = threading.Event()
    for thread in model.writer.threads:
        thread.submit(go.wait, 60)
    return go


def test_the_server_goes_on_while_the_disk_is_slow(target):
    go = held(target)
    ids, states = random_states(8)
    forward(target, [("hs-0-4-0", 4, 0), ("hs-1-4-0", 4, 0)], ids, states)
    assert list(target.out.iterdir()) == []  # and forward has returned
    states_before, ids_before = states.clone(), ids.clone()
    ids[:], states[:] = 0, 0  # the server fills its buffers again
    go.set()
    check(target, "hs-0-4-0", ids_before[:4], states_before[:4])
    check(target, "hs-1-4-0", ids_before[4:], states_before[4:])


def test_a_full_ring_makes_the_server_wait_a_bounded_time_and_costs_requests_not_memory(target):
    go = held(target)
    requests = [(f"hs-{i}-1-0", 1, 0) for i in range(hook.SLOTS + 8)]
    started = time.monotonic()
    forward(target, requests, *random_states(len(requests)))
    assert 0.25 < time.monotonic() - started < 30  # patience once, not for each of the eight
    assert target.writer.free.qsize() == 0
    go.set()
    names = files(target)
    assert names.count("hs-0-1-0.safetensors") == 1 and len([n for n in names if n.endswith(".err")]) == 8
    assert "took nothing for" in error(target, f"hs-{hook.SLOTS}-1-0")
    assert target.writer.free.qsize() == hook.SLOTS  # and all can be used again
    ids, states = random_states(3)
    forward(target, [("hs-0-3-1", 3, 0)], ids, states)
    check(target, "hs-0-3-1", ids, states)


def test_decoding_requests_in_a_mixed_batch_take_their_row_and_are_skipped(target):
    ids, states = random_states(3)
    forward(target, [("hs-0-3-0", 3, 0)], ids, states)
    more_ids, more = random_states(6)
    forward(target, [("hs-0-3-0", 1, 3), ("hs-1-4-0", 4, 0), ("hs-0-3-0", 1, 4)], more_ids, more)
    check(target, "hs-0-3-0", ids, states)
    check(target, "hs-1-4-0", more_ids[1:5], more[1:5])
    assert len(files(target)) == 2


def test_pure_decoding_writes_nothing(target):
    forward(target, [("hs-0-1-0", 1, 0)], *random_states(1), extend=False)
    assert files(target) == []


@pytest.mark.parametrize("rid", ["", "hs-1-2", "hs-1-2-0/..", "../hs-1-2-0", "hs-1-2-0\n", "hs-1-2-x", "hs-1-²-0",
                                 "HS-1-2-0", "hs-" + "1" * 300 + "-2-0", "HEALTH_CHECK_1"])
def test_only_whitelisted_request_ids_name_a_file(target, rid):
    forward(target, [(rid, 2, 0), ("hs-1-2-0", 2, 0)], *random_states(4))
    assert files(target) == ["hs-1-2-0.safetensors"]


# --- the hook: faults -------------------------------------------------------------------------------------------------

def error(model, rid):
    written(model)
    assert not (model.out / f"{rid}.safetensors").exists()
    sentence = (model.out / f"{rid}.err").read_text()
    assert sentence.count("\n") == 1
    return sentence


def test_a_gap_between_chunks_is_an_error_that_later_chunks_do_not_overwrite(target):
    ids, states = random_states(10)
    forward(target, [("hs-0-10-0", 3, 0)], ids[:3], states[:3])
    forward(target, [("hs-0-10-0", 3, 5)], ids[5:8], states[5:8])
    assert "tokens 3 to 5" in error(target, "hs-0-10-0")
    forward(target, [("hs-0-10-0", 2, 8)], ids[8:], states[8:])
    assert "tokens 3 to 5" in error(target, "hs-0-10-0")


def test_a_radix_cache_hit_is_an_error_that_names_the_flag(target):
    forward(target, [("hs-0-10-0", 6, 4), ("hs-1-2-0", 2, 0)], *random_states(8))
    assert "--disable-radix-cache" in error(target, "hs-0-10-0")
    assert (target.out / "hs-1-2-0.safetensors").exists()  # its neighbour is none the worse


def test_more_tokens_than_the_rid_says_are_an_error(target):
    forward(target, [("hs-0-3-0", 4, 0)], *random_states(4))
    assert "rid says 3" in error(target, "hs-0-3-0")


def test_start_zero_begins_anew(target):
    ids, states = random_states(5)
    forward(target, [("hs-0-5-0", 3, 0)], *random_states(3))
    forward(target, [("hs-0-5-0", 2, 0)], ids[:2], states[:2])
    forward(target, [("hs-0-5-0", 3, 2)], ids[2:], states[2:])
    check(target, "hs-0-5-0", ids, states)


@pytest.mark.parametrize("form, layers", [("none", 3), ("list", 2), ("packed", 4)])
def test_another_number_of_captured_layers_is_an_error(target, form, layers):
    forward(target, [("hs-0-3-0", 3, 0)], *random_states(3, layers), form)
    assert "wanted 3 captured layers" in error(target, "hs-0-3-0")


def test_fewer_rows_than_the_batch_says_are_an_error(target):
    forward(target, [("hs-0-2-0", 2, 0), ("hs-1-4-0", 4, 0)], *random_states(5))
    assert "4 tokens" in error(target, "hs-1-4-0") and (target.out / "hs-0-2-0.safetensors").exists()


def test_a_norm_hook_that_never_fired_is_an_error(target):
    ids, states = random_states(2)
    forward(target, [("hs-0-2-0", 2, 0)], ids, states)  # and its last state is not left over for the next forward
    batch = SimpleNamespace(rids=["hs-1-2-0"], extend_seq_lens_cpu=[2], extend_prefix_lens_cpu=[0],
                            forward_mode=SimpleNamespace(is_extend=lambda: True))
    target.logits_processor(ids, None, None, batch, list(states[:, :-1].unbind(1)))
    assert "wanted 3 captured layers" in error(target, "hs-1-2-0")


def test_remains_of_aborted_requests_do_not_pile_up(target):
    for i in range(3 * hook.MAX_PARTIAL):
        forward(target, [(f"hs-{i}-9-0", 2, 0)], *random_states(2))
    assert len(target.dump.partial) == hook.MAX_PARTIAL and f"hs-{i}-9-0" in target.dump.partial
    assert len(files(target)) == hook.MAX_PARTIAL  # temporary ones of those that may still go on
    assert len(os.listdir(f"/proc/{os.getpid()}/fd")) < hook.MAX_PARTIAL + 60


def test_a_full_disk_costs_the_request_and_not_the_server(target):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        forward(target, [("hs-0-200-0", 200, 0), ("hs-1-2-0", 2, 0)], *random_states(202))
        written(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "too large" in error(target, "hs-0-200-0")
    assert files(target) == ["hs-0-200-0.err", "hs-1-2-0.safetensors"]  # no temporary file is left


def test_an_error_that_cannot_be_written_is_logged(target, caplog):
    shutil.rmtree(target.out)
    forward(target, [("hs-0-2-0", 2, 0)], *random_states(2))
    written(target)
    assert "hs-0-2-0.err can't be written" in caplog.text


# --- the hook: start-up -----------------------------------------------------------------------------------------------

def start(tmp_path, monkeypatch, model, layer_ids, rank=0, **settings):
    """Both factories as SGLang calls them, with the rank of a tensor-parallel group of SGLang's, and its settings."""
    settings = {"pp_size": 1, "speculative_algorithm": None, "disaggregation_mode": "null", "watchdog_timeout": 300, **settings}
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_server_args=lambda: SimpleNamespace(**settings)))
    parallel = SimpleNamespace(get_attn_tensor_model_parallel_rank=lambda: rank)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", parallel)
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    specs = hook.forward_hooks(tmp_path / "out", layer_ids)
    factories = [getattr(hook, spec["hook_factory"].split(":")[1]) for spec in json.loads(json.dumps(specs))]
    assert all(factory.wants_model for factory in factories)
    return [factory({**spec["config"], "model": model}) for factory, spec in zip(factories, specs)]


def test_the_hooks_find_a_nested_language_model(tmp_path, monkeypatch):
    model = torch.nn.Module()
    model.language_model = Target()
    model.set_eagle3_layers_to_capture = model.language_model.set_eagle3_layers_to_capture
    start(tmp_path, monkeypatch, model, LAYERS)
    assert model.language_model.model.layers_to_capture == LAYERS


def test_two_matching_norms_stop_the_server_and_are_named(tmp_path, monkeypatch):
    model = Target()
    model.vision_model = torch.nn.Module()
    model.vision_model.norm = Norm()
    with pytest.raises(RuntimeError, match=r"vision_model\.norm"):
        start(tmp_path, monkeypatch, model, LAYERS)


def test_a_model_without_a_logits_processor_stops_the_server(tmp_path, monkeypatch):
    model = Target()
    del model.logits_processor
    with pytest.raises(RuntimeError, match="has 0"):
        start(tmp_path, monkeypatch, model, LAYERS)


@pytest.mark.parametrize("name, value", [("pp_size", 2), ("speculative_algorithm", "EAGLE3"), ("disaggregation_mode", "prefill")])
def test_a_server_whose_states_would_be_others_stops_and_names_the_setting(tmp_path, monkeypatch, name, value):
    with pytest.raises(RuntimeError, match=f"{name} = .*, this one has {value}"):
        start(tmp_path, monkeypatch, Target(), LAYERS, **{name: value})


def test_the_ring_waits_less_than_the_servers_watchdog(tmp_path, monkeypatch):
    assert start(tmp_path, monkeypatch, Target(), LAYERS, watchdog_timeout=300)[1].writer.patience <= 100
    assert start(tmp_path, monkeypatch, Target(), LAYERS, watchdog_timeout=30)[1].writer.patience <= 10


@pytest.mark.parametrize("factory", [hook.final_norm, hook.dump])
def test_an_unpatched_server_stops_with_the_way_out(factory, tmp_path, monkeypatch):
    start(tmp_path, monkeypatch, Target(), LAYERS)
    with pytest.raises(RuntimeError, match="make patch"):
        factory({"out": str(tmp_path), "layer_ids": LAYERS})


def deepseek(ids):
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


@pytest.mark.parametrize("arithmetic, layer_ids", [
    (lambda ids: [i + 1 for i in ids], [2, 15, 27]), (lambda ids: [i + 1 for i in ids], [1, 2, 3]),
    (deepseek, [2, 30, 58]), (deepseek, [5, 30, 58])])
def test_the_states_captured_are_those_entering_the_layers(tmp_path, monkeypatch, arithmetic, layer_ids):
    model = Target(arithmetic)
    start(tmp_path, monkeypatch, model, layer_ids)
    assert model.model.layers_to_capture == layer_ids


@pytest.mark.parametrize("arithmetic, layer_ids", [
    (deepseek, [1, 30, 58]), (lambda ids: [i + 2 for i in ids], LAYERS), (lambda ids: [], LAYERS)])
def test_a_model_that_would_capture_other_layers_stops_the_server(tmp_path, monkeypatch, arithmetic, layer_ids):
    with pytest.raises(RuntimeError, match="can't capture the states entering"):
        start(tmp_path, monkeypatch, Target(arithmetic), layer_ids)


@pytest.mark.parametrize("layer_ids", [[], [0, 2, 3], [3, 2, 5], [2, 2, 5]])
def test_layer_ids_must_ascend_from_one(layer_ids):
    with pytest.raises(ValueError, match="ascend"):
        hook.forward_hooks("out", layer_ids)


def test_ranks_but_the_first_capture_and_write_nothing(tmp_path, monkeypatch):
    model = Target()
    norm, dump = start(tmp_path, monkeypatch, model, LAYERS, rank=1)
    model.model.norm.register_forward_hook(norm)
    model.logits_processor.register_forward_hook(dump)
    forward(model, [("hs-0-2-0", 2, 0)], *random_states(2))
    hook._pre_norm.clear()
    assert model.model.layers_to_capture == LAYERS and not (tmp_path / "out").exists()


def test_the_launcher_needs_neither_torch_nor_sglang():
    printed = subprocess.run([sys.executable, PATCHES / "hidden_states_hook.py", "out", "2", "5", "7"], capture_output=True, text=True)
    assert json.loads(printed.stdout) == hook.forward_hooks("out", LAYERS)
    code = ("import sys, hidden_states_hook; hidden_states_hook.forward_hooks('out', [2, 5, 7]); "
            "assert not {'torch', 'sglang'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=PATCHES, check=True)
