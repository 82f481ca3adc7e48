"""Hidden-state files, the target's head, and the states that transformers gives, on a tiny target."""
import shutil
import sys
import threading

import pytest
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config

import contract
import states
import tiny
from stage import Refused

torch.set_num_threads(1)
H, LAYERS, IDS = 64, [2, 4, 5], [1, 20, 100, 7, 258, 3, 3, 90, 41]


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(tiny_target):
    return states.reference(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def transformers_own(tiny_target):
    """What enters each layer and the norm, by hooks of this test, and the logits: ({layer: [T, H]}, pre-norm, logits)."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    entering, last = {}, []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda m, args, kwargs, i=i: entering.update({i: (args or [kwargs["hidden_states"]])[0][0]}),
                                        with_kwargs=True)
    model.model.norm.register_forward_hook(lambda m, args, out: last.extend([args[0][0], out[0]]))
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    return entering, *last, logits


def written(path, ids=IDS, shape=None, dtype=torch.bfloat16, value=None, names=("hidden_states", "token_ids")):
    data = torch.randn(shape or (len(ids), 4, H), generator=torch.Generator().manual_seed(0)).to(dtype)
    if value is not None:
        data[3, 1, 5] = value
    save_file(dict(zip(names, (data, torch.tensor(ids)))), path)
    return path


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# --- files ------------------------------------------------------------------------------------------------------------

def test_a_good_file_is_returned_and_intact(tmp_path):
    path = written(states.file_of(tmp_path, 3))
    assert path.name == "hs_3.safetensors"
    assert states.check(path, IDS, H)["hidden_states"].shape == (len(IDS), 4, H)
    assert states.intact(path, IDS, H)


@pytest.mark.parametrize("ids", [IDS[:-1], [*IDS, 5], [*IDS[:-1], 42], IDS[::-1]])
def test_a_file_of_other_token_ids_is_neither_accepted_nor_intact(tmp_path, ids):
    path = written(tmp_path / "hs_0.safetensors")
    with pytest.raises(Refused, match="hs_0.safetensors holds other token ids"):
        states.check(path, ids, H)
    assert not states.intact(path, ids, H)


@pytest.mark.parametrize("shape", [(len(IDS) - 1, 4, H), (len(IDS), 3, H), (len(IDS), 4, H // 2), (4, len(IDS), H), (len(IDS), 4 * H)])
def test_states_of_another_shape_are_neither_accepted_nor_intact(tmp_path, shape):
    path = written(tmp_path / "hs_0.safetensors", shape=shape)
    with pytest.raises(Refused, match="wanted bfloat16"):
        states.check(path, IDS, H)
    assert not states.intact(path, IDS, H)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_in_another_precision_are_refused(tmp_path, dtype):
    with pytest.raises(Refused, match="wanted bfloat16"):
        states.check(written(tmp_path / "hs_0.safetensors", dtype=dtype), IDS, H)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused(tmp_path, value):
    with pytest.raises(Refused, match="not finite"):
        states.check(written(tmp_path / "hs_0.safetensors", value=value), IDS, H)


@pytest.mark.parametrize("names", [("states", "token_ids"), ("hidden_states", "input_ids")], ids=["states", "ids"])
def test_a_file_that_lacks_a_tensor_is_refused(tmp_path, names):
    path = written(tmp_path / "hs_0.safetensors", names=names)
    with pytest.raises(Refused, match="hs_0.safetensors"):
        states.check(path, IDS, H)


@pytest.mark.parametrize("names", [("states", "token_ids"), ("hidden_states", "input_ids")], ids=["states", "ids"])
def test_a_file_that_lacks_a_tensor_is_not_intact(tmp_path, names):
    assert not states.intact(written(tmp_path / "hs_0.safetensors", names=names), IDS, H)


BROKEN = {"empty": lambda data: b"", "cut in the header": lambda data: data[:20], "5 bytes short": lambda data: data[:-5],
          "without its body": lambda data: data[:8 + int.from_bytes(data[:8], "little")],
          "trailing bytes": lambda data: data + b"\0" * 5, "other contents": lambda data: b"x" * len(data)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_not_intact_and_is_refused_when_fresh(tmp_path, name):
    path = written(tmp_path / "hs_0.safetensors")
    assert states.intact(path, IDS, H)
    path.write_bytes(BROKEN[name](path.read_bytes()))
    assert not states.intact(path, IDS, H)
    with pytest.raises(Refused, match="hs_0.safetensors can't be read"):
        states.check(path, IDS, H)


def test_norms_of_fp8_take_fewer_calls_than_tokens():
    """A call a token made 16 threads on 2 cores wait for each other: 94 ms a row, now 18."""
    values, scales = quantize_tensor_to_fp8(torch.randn(1024, 4, H))
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event == "c_call"))
    try:
        norms = states.norms_of({"hidden_states": values, "hidden_states_scales": scales})
    finally:
        sys.setprofile(None)
    assert 0 < sum(calls) < len(norms) / 2


def test_a_missing_file_is_not_intact(tmp_path):
    assert not states.intact(tmp_path / "hs_0.safetensors", IDS, H)


def test_publishing_moves_the_file_itself_and_replaces_what_stood_there(tmp_path):
    source, destination = written(tmp_path / "fresh"), tmp_path / "hs_0.safetensors"
    destination.write_bytes(b"torn")
    inode, data = source.stat().st_ino, source.read_bytes()
    states.Store(tmp_path, H).publish(source, 0)
    assert destination.stat().st_ino == inode and destination.read_bytes() == data and not source.exists()


def test_whoever_reads_while_files_are_published_finds_whole_ones(tmp_path):
    original, destination = written(tmp_path / "original", list(range(4000))), tmp_path / "hs_0.safetensors"
    shutil.copy(original, destination)
    whole, seen, over, store = original.read_bytes(), [], threading.Event(), states.Store(tmp_path, H)

    def reader():
        while not over.is_set():
            seen.append(destination.read_bytes() == whole)

    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(20):
        shutil.copy(original, tmp_path / "fresh")
        store.publish(tmp_path / "fresh", 0)
    over.set()
    thread.join()
    assert len(seen) > 5 and all(seen)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("token, slot, factor", [(3, 1, 0.0), (8, 3, 1e4), (0, 0, 1e-4)])
def test_a_state_whose_norm_is_out_of_the_samples_range_is_refused(tmp_path, fp8, token, slot, factor):
    data = torch.randn(len(IDS), 4, H).bfloat16()
    limits = (torch.full((4,), 0.08), torch.full((4,), 800.0))

    def saved(x):
        tensors = {"token_ids": torch.tensor(IDS), "hidden_states": x}
        if fp8:
            tensors["hidden_states"], tensors["hidden_states_scales"] = quantize_tensor_to_fp8(x)
        save_file(tensors, tmp_path / "hs_0.safetensors")
        return tmp_path / "hs_0.safetensors"

    norms = states.check(saved(data), IDS, H, fp8, limits)["norms"]
    torch.testing.assert_close(norms, data.float().norm(dim=-1), rtol=0.03, atol=0)
    data[token, slot] *= factor
    with pytest.raises(Refused, match=f"hs_0.safetensors token {token}: state"):
        states.check(saved(data), IDS, H, fp8, limits)


# --- head and reference -----------------------------------------------------------------------------------------------

def test_the_reference_gives_the_states_that_enter_the_layers_and_the_last_before_the_norm(reference, transformers_own):
    entering, before_norm, _, _ = transformers_own
    found = reference(IDS, LAYERS)
    assert found.shape == (len(IDS), 4, H) and found.dtype == torch.float32
    for slot, layer in enumerate(LAYERS):
        assert relative(found[:, slot], entering[layer]) < 1e-6
        assert relative(found[:, slot], entering[layer + 1]) > 0.05   # neighbours differ, so the test can tell
        assert relative(found[:, slot], entering[layer - 1]) > 0.05
    assert relative(found[:, 3], before_norm) < 1e-6


def test_the_reference_reads_rows_one_after_another_without_mixing_them(reference):
    first = reference(IDS, LAYERS)
    reference([5] * 30, LAYERS)
    assert torch.equal(reference(IDS, LAYERS), first)
    assert relative(reference([*IDS, 8, 8], LAYERS)[:len(IDS)], first) < 1e-5   # nor does the future change the past


def test_head_logits_of_states_before_the_norm_are_the_targets_own(tiny_target, transformers_own):
    _, before_norm, _, logits = transformers_own
    found = states.Head(tiny_target).logits(before_norm)
    assert found.shape == logits.shape and relative(found, logits) < 1e-5
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_head_logits_of_states_after_the_norm_are_others(tiny_target, transformers_own):
    _, _, after_norm, logits = transformers_own
    found = states.Head(tiny_target).logits(after_norm)
    assert relative(found, logits) > 0.2 and not torch.equal(found.argmax(-1), logits.argmax(-1))


def test_a_tied_head_is_the_embedding(tiny_target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    from safetensors import safe_open
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()
    before = states.reference(tmp_path, torch.float32)(IDS, LAYERS)[:, 3]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert relative(states.Head(tmp_path).logits(before), again(torch.tensor([IDS])).logits[0]) < 1e-5


def test_a_target_whose_norm_gain_is_one_plus_w_is_refused_with_the_reason(tmp_path):
    Gemma2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"gemma2.*1 \+ w"):
        contract.layer_ids(tmp_path)


def test_token_errors_are_relative_and_one_for_each_token_and_slot():
    wanted = torch.ones(3, 4, H)
    found = wanted.clone()
    found[1, 2] *= 1.5
    errors = states.token_errors(found, wanted)
    assert errors.shape == (3, 4) and errors[1, 2].item() == pytest.approx(0.5)
    assert errors.sum().item() == pytest.approx(0.5)
