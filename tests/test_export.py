"""A draft trained by speculators, exported for SGLang: the same logits, the right names; and every fault shows."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
import packing
import states
import tiny
import trainer
import vocab
from stage import Refused

torch.set_num_threads(1)
LAYERS, K, V, H = [2, 4, 5], 100, 320, 64


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


def dataset(path, reference):
    """02's dataset and 03's files for two rows, and the Data that 04 makes of them."""
    from datasets import Dataset

    ids = torch.randint(3, 259, (2, 50), generator=torch.Generator().manual_seed(1)).tolist()
    data = Dataset.from_list([{"input_ids": row, "loss_mask": [0] * 10 + [1] * 40, "seq_len": 50, "id": f"r{k}",
                               "split": ("train", "val")[k]} for k, row in enumerate(ids)])
    data.set_format("torch")
    data.save_to_disk(path / "02" / "dataset")
    (path / "03").mkdir()
    for k, row in enumerate(ids):
        save_file({"hidden_states": reference(row, LAYERS).to(torch.bfloat16), "token_ids": torch.tensor(row)},
                  states.file_of(path / "03", k))
    return packing.Data(path / "02", path / "03", hidden_size=64, batch_tokens=128, epochs=1, seed=0, ranks=trainer.Ranks())


def exported(target, path, **recipe):
    """A draft whose norms are far from one, exported as 04 exports it: (04's directory, ids, aux states)."""
    data = dataset(path, states.reference(target, torch.float32))
    d2t, t2d = vocab.mapping({t: 1 + t % 7 for t in range(0, V, 2)}, K, V, always=[2])
    draft = trainer.build_draft(target, LAYERS, d2t, t2d, ttt_steps=3, **recipe)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name and parameter.requires_grad:
                parameter.uniform_(0.3, 2.5, generator=generator)
            elif parameter.requires_grad:
                parameter.mul_(4)                                 # else attention hardly depends on anything
    (path / "04").mkdir()
    export.export(draft, data, Path(target), path / "04")         # compares too, and raises
    sample = data.samples[1]
    return path / "04", sample["input_ids"], sample["hidden_states"].float()


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory):
    return exported(tiny_target, tmp_path_factory.mktemp("export"))


@pytest.fixture
def altered(made, tmp_path):
    """altered(change, **config): a copy of the export whose weights were changed and whose config got other entries."""
    def build(change=lambda weights: None, **config):
        shutil.copytree(made[0], tmp_path / "04")
        weights = load_file(tmp_path / "04/sglang/model.safetensors")
        change(weights)
        save_file({k: v.clone() for k, v in weights.items()}, tmp_path / "04/sglang/model.safetensors")
        path = tmp_path / "04/sglang/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return tmp_path / "04"
    return build


def error(out, made, tiny_target, steps=3):
    return export.compare(out, Path(tiny_target), made[1], made[2], steps)


def swap(a, b):
    def change(weights):
        weights[a], weights[b] = weights[b], weights[a]
    return change


def ones(name):
    return lambda weights: weights[name].fill_(1.0)


M = "midlayer."


# --- the same logits --------------------------------------------------------------------------------------------------

def test_the_export_gives_the_trainers_logits(made, tiny_target):
    assert error(made[0], made, tiny_target) < export.TOLERANCE


def test_an_unchanged_copy_gives_them_too(made, tiny_target, altered):
    assert error(altered(), made, tiny_target) < export.TOLERANCE


@pytest.mark.parametrize("recipe, spoilt", [
    (dict(layers=3), "layers.2.hidden_norm.weight"), (dict(norms="3"), M + "hidden_norm.weight"), (dict(lm_head="trained"), "norm.weight"),
    (dict(layers=2, norms="3", lm_head="trained"), "layers.1.post_attention_layernorm.weight")], ids=str)
def test_every_recipe_is_exported_with_the_trainers_logits(tiny_target, tmp_path, recipe, spoilt):
    out, ids, aux = exported(tiny_target, tmp_path, **recipe)
    config = json.loads((out / "sglang/config.json").read_text())
    assert config["num_hidden_layers"] == recipe.get("layers", 1)
    assert config["fc_norm"] is config["norm_output"] is ("norms" not in recipe)
    weights = load_file(out / "sglang/model.safetensors")
    head = trainer.load_draft(out / "draft", tiny_target)
    assert torch.equal(weights["lm_head.weight"], head.lm_head.weight.to(torch.bfloat16))
    assert torch.equal(head.lm_head.weight, head.verifier_lm_head.weight) is ("lm_head" not in recipe)
    weights[spoilt].fill_(1.0)
    save_file(weights, out / "sglang/model.safetensors")
    assert export.compare(out, Path(tiny_target), ids, aux) > 10 * export.TOLERANCE


def test_the_embedding_beside_the_draft_is_the_targets(made, tiny_target):
    held, target = load_file(made[0] / "draft/model.safetensors"), load_file(Path(tiny_target) / "model.safetensors")
    assert torch.equal(held["embed_tokens.weight"], target["model.embed_tokens.weight"])


@pytest.mark.parametrize("change", [
    swap("fc_norm.0.weight", "fc_norm.1.weight"), swap("fc_norm.1.weight", "fc_norm.2.weight"),
    swap(M + "hidden_norm.weight", M + "input_layernorm.weight"), ones("norm.weight"), ones(M + "post_attention_layernorm.weight"),
    swap(M + "self_attn.k_proj.weight", M + "self_attn.v_proj.weight"), swap(M + "mlp.gate_proj.weight", M + "mlp.up_proj.weight"),
    lambda w: w.update({"fc.weight": w["fc.weight"].roll(64, 1)}), lambda w: w.update({"lm_head.weight": w["lm_head.weight"].roll(1, 0)}),
], ids=["fc_norm 0 and 1", "fc_norm 1 and 2", "hidden and input norm", "no final norm", "no post norm", "k and v", "gate and up",
        "layers in another order", "vocabulary shifted"])
def test_one_wrong_tensor_shows(made, tiny_target, altered, change):
    assert error(altered(change), made, tiny_target) > 10 * export.TOLERANCE


@pytest.mark.parametrize("name, value", [("rope_theta", 100.0), ("rms_norm_eps", 1.0)])
def test_one_wrong_setting_shows(made, tiny_target, altered, name, value):
    config = json.loads((made[0] / "sglang/config.json").read_text())
    more = {"rope_parameters": config["rope_parameters"] | {name: value}} if name == "rope_theta" else {}
    assert error(altered(**{name: value}, **more), made, tiny_target) > 10 * export.TOLERANCE


def test_a_fault_that_only_further_proposals_see_shows(made, tiny_target, monkeypatch):
    """The state fed back without the final norm's gain, as a server that does not know norm_output would."""
    class Other(export.Served):
        def decode(self, token, state, position, cache):
            return super().decode(token, state / self.w["norm.weight"], position, cache)

    monkeypatch.setattr(export, "Served", Other)
    assert error(made[0], made, tiny_target, steps=1) < export.TOLERANCE
    assert error(made[0], made, tiny_target, steps=2) > 10 * export.TOLERANCE


def test_a_position_off_by_one_in_further_proposals_shows(made, tiny_target, monkeypatch):
    class Other(export.Served):
        def decode(self, token, state, position, cache):
            return super().decode(token, state, position + 1, cache)

    monkeypatch.setattr(export, "Served", Other)
    assert error(made[0], made, tiny_target, steps=1) < export.TOLERANCE
    assert error(made[0], made, tiny_target, steps=2) > 2 * export.TOLERANCE


def test_an_export_with_other_logits_is_refused(made, tiny_target, monkeypatch, tmp_path):
    class Other(export.Served):
        def extend(self, ids, aux):
            return super().extend(ids, aux.roll(64, -1))

    data = dataset(tmp_path, states.reference(tiny_target, torch.float32))
    monkeypatch.setattr(export, "Served", Other)
    (tmp_path / "04").mkdir()
    with pytest.raises(RuntimeError, match="other logits than the trainer"):
        export.export(trainer.load_draft(made[0] / "draft", tiny_target), data, Path(tiny_target), tmp_path / "04")


def test_the_unrolled_draft_proposes_what_a_server_would_step_by_step(made, tiny_target):
    """As long as what it proposed before was right: both are fed with the true tokens."""
    out, ids, aux = made
    draft = trainer.load_draft(out / "draft", tiny_target)
    proposals = trainer.unroll(draft, ids, aux, 3)
    served = export.Served(out / "sglang", draft.embed_tokens.weight)
    with torch.no_grad():
        for j in range(0, len(ids) - 4, 3):
            logits, state, cache = served.extend(ids[1:j + 2], aux[:j + 1])    # the draft has read up to j and holds j + 1
            state = state[-1:]
            for k in range(3):
                assert proposals[k][j] == logits[-1].argmax(), (j, k)
                logits, state, cache = served.decode(ids[j + 2 + k:j + 3 + k], state, j + 1 + k, cache)


# --- the files --------------------------------------------------------------------------------------------------------

def test_the_config_says_what_sglang_reads(made, tiny_target):
    config = json.loads((made[0] / "sglang/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in LAYERS]
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "bfloat16"
    assert (config["fc_norm"], config["norm_output"], config["norm_before_fc"]) == (True, True, False)
    assert (config["draft_vocab_size"], config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (K, V, H, 1)
    target = json.loads((Path(tiny_target) / "config.json").read_text())
    assert config["max_position_embeddings"] >= target["max_position_embeddings"]
    assert config["rope_theta"] == target["rope_parameters"]["rope_theta"]


def test_the_weights_are_bfloat16_and_the_maps_are_integers_and_truths(made):
    weights = load_file(made[0] / "sglang/model.safetensors")
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    assert {v.dtype for k, v in weights.items() if k not in ("d2t", "t2d")} == {torch.bfloat16}
    tokens = torch.arange(K) + weights["d2t"]
    assert torch.equal(weights["t2d"].nonzero().flatten(), tokens) and 2 in tokens
    assert "embed_tokens.weight" not in weights


def test_speculators_own_config_keeps_the_layers_as_they_were_chosen(made):
    config = json.loads((made[0] / "draft/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYERS


def test_no_path_of_this_machine_travels_along(made, tiny_target):
    for name in ("draft/config.json", "sglang/config.json"):
        text = (made[0] / name).read_text()
        assert "/tmp" not in text and str(Path(tiny_target).parent) not in text


def broken(made, folder, change):
    """The draft in speculators' format with its weights changed, for convert()."""
    shutil.copytree(made[0] / "draft", folder / "draft")
    weights = load_file(folder / "draft/model.safetensors")
    change(weights)
    save_file({k: v.clone() for k, v in weights.items()}, folder / "draft/model.safetensors")
    (folder / "sglang").mkdir()
    return folder / "draft", folder / "sglang"


@pytest.mark.parametrize("name", ["fc_norm.1.weight", "norm.weight", "d2t", "t2d", "layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_weight_is_an_error_with_its_name(made, tmp_path, name):
    source, destination = broken(made, tmp_path, lambda w: w.pop(name))
    with pytest.raises(RuntimeError, match=name.removeprefix("layers.0.")):
        export.convert(source, destination)
    assert list(destination.iterdir()) == []


@pytest.mark.parametrize("name, value", [("layers.1.mlp.up_proj.weight", torch.zeros(2)), ("layers.0.self_attn.q_proj.bias", torch.zeros(64)),
                                         ("norm.weight", torch.zeros(65)), ("d2t", torch.zeros(K + 1, dtype=torch.int64))])
def test_an_additional_weight_or_another_shape_is_an_error_with_its_name(made, tmp_path, name, value):
    source, destination = broken(made, tmp_path, lambda w: w.update({name: value}))
    with pytest.raises(RuntimeError, match=name.removeprefix("layers.0.")):
        export.convert(source, destination)


def test_converting_again_gives_the_same_bytes(made, tmp_path):
    source, destination = broken(made, tmp_path, lambda w: None)
    export.convert(source, destination)
    for file in destination.iterdir():
        assert (made[0] / "sglang" / file.name).read_bytes() == file.read_bytes()
    assert len(list(destination.iterdir())) == 2


# --- drafts that would be served wrongly ---------------------------------------------------------------------------------

def taken(out, tiny_target, folder, layers=None):
    return export.adopt(out, folder / "adopted", Path(tiny_target), layers)


def test_the_served_layers_are_those_of_the_contract_in_each_engines_field(made, tiny_target, tmp_path, altered):
    assert taken(made[0], tiny_target, tmp_path, LAYERS) == made[0] / "sglang"
    assert json.loads((made[0] / "draft/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == LAYERS
    with pytest.raises(Refused, match=r"entering layers \[2, 4, 5\], wanted \[2, 4, 6\]"):
        taken(made[0], tiny_target, tmp_path, [2, 4, 6])
    with pytest.raises(Refused, match=r"entering layers \[\], wanted some"):
        taken(altered(eagle_config={}), tiny_target, tmp_path)


@pytest.mark.parametrize("changed, said", [
    (dict(max_position_embeddings=1024), "max_position_embeddings 1024, wanted at least the target's 2048"), (dict(hidden_size=32), "hidden_size 32"),
    (dict(vocab_size=321), "vocab_size 321"), (dict(tie_word_embeddings=True), "tie_word_embeddings"), (dict(norm_before_residual=True), "norm_before_residual"),
    (dict(layer_types=["sliding_attention"]), "sliding attention"), (dict(architectures=["LlamaForCausalLMEagle"]), "architectures")], ids=str)
def test_a_draft_that_the_engine_serves_otherwise_is_refused_with_the_reason(tiny_target, tmp_path, altered, changed, said):
    with pytest.raises(Refused, match="would not be served as it was trained: .*" + said):
        taken(altered(**changed), tiny_target, tmp_path)


def foreign(made, folder, change=lambda weights: None, drop=(), **config):
    shutil.copytree(made[0] / "sglang", folder / "theirs")
    weights = load_file(folder / "theirs/model.safetensors")
    change(weights)
    save_file({k: v.clone() for k, v in weights.items()}, folder / "theirs/model.safetensors")
    found = json.loads((folder / "theirs/config.json").read_text()) | config
    (folder / "theirs/config.json").write_text(json.dumps({k: v for k, v in found.items() if k not in drop}))
    return folder / "theirs"


def test_a_draft_of_others_gets_the_engines_default_layers_and_its_own_weights(made, tiny_target, tmp_path):
    theirs = foreign(made, tmp_path, drop=("eagle_config", "draft_vocab_size"), target_hidden_size=None)
    out = taken(theirs, tiny_target, tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4] and config["draft_vocab_size"] == K
    assert "target_hidden_size" not in config and "eagle_config" not in json.loads((theirs / "config.json").read_text())
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], load_file(theirs / "model.safetensors")["fc.weight"])


def test_speculators_own_layout_is_converted_to_what_04_exports(made, tiny_target, tmp_path):
    out = taken(made[0] / "draft", tiny_target, tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (made[0] / "sglang" / name).read_bytes()


@pytest.mark.parametrize("change, config, said", [
    (lambda w: w.pop("d2t"), {}, "no d2t"), (lambda w: w.pop("fc.weight"), {}, "no fc.weight"),
    (lambda w: None, {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "outside eagle_config")])
def test_a_draft_of_others_that_lacks_what_the_engine_needs_is_refused(made, tiny_target, tmp_path, change, config, said):
    with pytest.raises(Refused, match=said):
        taken(foreign(made, tmp_path, change, **config), tiny_target, tmp_path)
    assert not (tmp_path / "adopted").exists()


def test_a_speculators_draft_that_no_engine_here_serves_is_refused(made, tiny_target, tmp_path):
    shutil.copytree(made[0] / "draft", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(Refused, match="norm_before_residual, which SGLang does not know"):
        taken(tmp_path / "theirs", tiny_target, tmp_path)


def test_each_export_has_a_model_card_with_the_command_that_serves_it(made):
    cards = {name: (made[0] / name / "README.md").read_text() for name in ("draft", "sglang")}
    assert "not tried in vLLM" in cards["draft"] and "vllm serve tiny" in cards["draft"]
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in cards["sglang"]
    assert all("base_model: tiny" in card and str(LAYERS) in card for card in cards.values())
