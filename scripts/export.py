"""The trained draft in two formats: draft/ for speculators, sglang/ for SGLang; and the proof that both say the same.

SGLang skips weights it does not know and never misses those it lacks, so names and shapes are asserted here, and the
exported files are run as SGLang runs them (models/llama_eagle3.py of 0.5.23) in plain torch and compared with the
trainer's own logits.
"""
import json

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu

import contract
import progress
import stage
import trainer
from sglang_server import draft_flags
from stage import Refused

TOLERANCE = 2e-3  # of logits, relative to their largest: both sides compute in float32, the orders of summation differ


def export(draft, data, model, out, facts=()):
    """Write OUT/draft and OUT/sglang from a trained draft (bfloat16 both), a model card in each, then compare their logits on a
    held-out row.  facts: [(what, value)] of the training, for the card."""
    progress.phase("exporting the draft")
    with stage.directory(out / "draft") as folder:
        draft.to("cpu", torch.bfloat16).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = model.name  # no path of this machine travels along
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    with stage.directory(out / "sglang") as folder:
        convert(out / "draft", folder)
    for folder in ("draft", "sglang"):
        stage.write(out / folder / "README.md", card(folder, json.loads((out / "draft" / "config.json").read_text()), model.name, facts))
    progress.phase("comparing the export with the trainer")
    row = next(row for row in data.rows["val"] + data.rows["train"] if row not in data.broken)
    sample = data.samples[row]
    ids, aux = sample["input_ids"][:128], sample["hidden_states"][:128].float().cpu()
    error = compare(out, model, ids, aux)
    progress.log(f"exported draft, run as SGLang runs it: largest logit difference {error:.1e} of the largest logit")
    if not error < TOLERANCE:
        raise RuntimeError(f"the export gives other logits than the trainer: {error:.1e}, wanted less than {TOLERANCE}")


def adopt(source, destination, model, layer_ids=None):
    """The directory that a server is given: 04's sglang/, or a draft of others put into `destination`; Refused with the reasons if
    SGLang would not serve it as it was trained.  layer_ids: those that the contract of its run names."""
    served = source / "sglang"
    if not (served / "config.json").exists():
        served = destination
        with stage.directory(destination) as folder:
            _foreign(source, folder, model)
    config, target = json.loads((served / "config.json").read_text()), contract.text_config(model)
    found = [i + 1 for i in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []]
    _refuse(source, config, config, {
        f"architectures {config.get('architectures')}": config.get("architectures") != ["LlamaForCausalLMEagle3"],
        f"it reads the states entering layers {found}, wanted {layer_ids or 'some'}": not found or found != (layer_ids or found),
        f"max_position_embeddings {config.get('max_position_embeddings')}, wanted at least the target's {target.max_position_embeddings}":
            config.get("max_position_embeddings", 2048) < target.max_position_embeddings,  # 2048: where a config names none
        **{f"{name} {config.get(name)}, the target's is {getattr(target, name)}": config.get(name) != getattr(target, name)
           for name in ("hidden_size", "vocab_size")},
        "tie_word_embeddings, so its head would be its embedding": config.get("tie_word_embeddings")})
    return served


def _foreign(source, folder, model):
    """A checkpoint of others in SGLang's layout: speculators' is converted; SpecForge's and EAGLE's gets its layers named, which
    are the engine's default if it names none."""
    if not (source / "config.json").exists() or not list(source.glob("*.safetensors")):
        raise Refused(f"{source}: wanted a draft's config.json and safetensors (a pickle can run code: convert it first)")
    config = json.loads((source / "config.json").read_text())
    if layer := config.get("transformer_layer_config"):
        _refuse(source, config, layer, {f"layers of {layer.get('model_type')}": layer.get("model_type") != "llama"})
        try:
            return convert(source, folder)
        except (RuntimeError, KeyError, OSError) as error:
            raise Refused(f"{source}: {error}") from None
    weights = {name: value for path in sorted(source.glob("*.safetensors")) for name, value in load_file(path).items()}
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    _refuse(source, config, config, {
        "no fc.weight: it is not of EAGLE-3": "fc.weight" not in weights, "fewer proposals than the target has tokens, and no d2t":
            "d2t" not in weights and len(weights.get("lm_head.weight", ())) not in (0, config.get("vocab_size")),
        "its layers stand outside eagle_config, where SGLang does not look": not layers and "eagle_aux_hidden_state_layer_ids" in config})
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers or [i - 1 for i in contract.layer_ids(model)]}
    config = {"draft_vocab_size": len(weights.get("d2t", weights.get("lm_head.weight", ())))} | {k: v for k, v in config.items() if v is not None}
    config |= {"model_type": "llama", "eagle_config": eagle}
    if config.get("architectures") == ["LlamaForCausalLM"]:  # EAGLE's own files
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    stage.write(folder / "config.json", json.dumps(config, indent=1) + "\n")


def _refuse(source, config, layer, rules):
    rules |= {"norm_before_residual, which SGLang does not know": config.get("norm_before_residual"),
              "norm_before_fc, which Eaglet does not export": config.get("norm_before_fc"),
              "sliding attention, which SGLang gives no draft": "sliding_attention" in (layer.get("layer_types") or ())}
    if wrong := [sentence for sentence, broken in rules.items() if broken]:
        raise Refused(f"{source} would not be served as it was trained: {'; '.join(wrong)}")


def convert(source, destination):
    """speculators' files to those that SGLang's LlamaForCausalLMEagle3 loads.

    Layer ids: speculators' id i is the state entering layer i; SGLang's is the output of layer i, so i - 1.
    Embedding: left out, since SGLang uses the target's.
    """
    config = json.loads((source / "config.json").read_text())
    layer = config["transformer_layer_config"]
    weights = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(source / "model.safetensors").items()}
    weights = {k.replace("input_layernorm", "hidden_norm") if k.startswith("layers.") else k: v for k, v in weights.items()}
    weights.pop("embed_tokens.weight")
    if config["draft_vocab_size"] == layer["vocab_size"]:  # speculators keeps no map then
        weights |= {"d2t": torch.zeros(layer["vocab_size"], dtype=torch.long), "t2d": torch.ones(layer["vocab_size"], dtype=torch.bool)}
    expected = shapes(layer, config["draft_vocab_size"], config["fc_norm"])
    found = {k: tuple(v.shape) for k, v in weights.items()}
    if found != expected:
        different = sorted(set(found.items()) ^ set(expected.items()))
        raise RuntimeError(f"the draft's weights are not those that SGLang loads: {different}")
    rope = layer.get("rope_parameters") or {}
    served = {k: v for k, v in layer.items() if k not in ("layer_types", "sliding_window", "use_sliding_window") and v is not None}
    served |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "tie_word_embeddings": False,
               "torch_dtype": "bfloat16", "draft_vocab_size": config["draft_vocab_size"], "fc_norm": config["fc_norm"],
               "norm_output": config["norm_output"], "norm_before_fc": False, "num_aux_hidden_states": 3, "rope_theta": rope.get("rope_theta", 10000.0),
               "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids":
                                [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]}}
    if rope.get("rope_type", "default") != "default":  # servers that know transformers 4 only read this field
        served["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    save_file({k: v.contiguous() for k, v in weights.items()}, destination / "model.safetensors", metadata={"format": "pt"})
    stage.write(destination / "config.json", json.dumps(served, indent=1) + "\n")


def shapes(layer, draft_vocab, fc_norm):
    """Name -> shape of every weight that SGLang fills for this recipe, and the vocabulary maps."""
    h, i, d = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv = layer["num_attention_heads"] * d, layer["num_key_value_heads"] * d
    expected = {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (draft_vocab, h),
                "d2t": (draft_vocab,), "t2d": (layer["vocab_size"],), **{f"fc_norm.{k}.weight": (h,) for k in range(3 * fc_norm)},
                "midlayer.input_layernorm.weight": (h,)}
    for k in range(layer["num_hidden_layers"]):  # the first reads the embedding too
        m, wide = (f"layers.{k}.", h) if k else ("midlayer.", 2 * h)
        expected |= {m + "hidden_norm.weight": (h,), m + "post_attention_layernorm.weight": (h,),
                     m + "self_attn.q_proj.weight": (q, wide), m + "self_attn.k_proj.weight": (kv, wide),
                     m + "self_attn.v_proj.weight": (kv, wide), m + "self_attn.o_proj.weight": (h, q),
                     m + "mlp.gate_proj.weight": (i, h), m + "mlp.up_proj.weight": (i, h), m + "mlp.down_proj.weight": (h, i)}
    return expected


class Served:
    """The exported draft as SGLang runs it, from the exported files alone, in float32: one row, no batching.

    embedding: the target's [V, H]; T positions of a row, A = 3 H.
    """

    def __init__(self, directory, embedding):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = LlamaConfig.from_pretrained(directory)
        self.w = {k: v.float() if v.is_floating_point() else v for k, v in load_file(directory / "model.safetensors").items()}
        self.embedding, self.rotary = embedding.float(), LlamaRotaryEmbedding(self.config)

    def extend(self, ids, aux):
        """Read a row: token ids [T] shifted by one against the states aux [T, A] -> (logits [T, K], states [T, H], cache)."""
        chunks = [self._norm(c, f"fc_norm.{k}") if self.config.fc_norm else c for k, c in enumerate(aux.chunk(3, -1))]
        return self._layers(ids, linear(torch.cat(chunks, -1), self.w["fc.weight"]), start=0, cache=[None] * self.config.num_hidden_layers)

    def decode(self, token, state, position, cache):
        """One more proposal: the token [1] proposed last and the draft's own state [1, H]; cache up to `position`."""
        return self._layers(token, state, position, cache)

    def _layers(self, ids, states, start, cache):
        kept = []
        for k, past in enumerate(cache):
            m = f"layers.{k}." if k else "midlayer."
            x = self._norm(states, m + "hidden_norm")
            if not k:
                x = torch.cat([self._norm(self.embedding[ids], m + "input_layernorm"), x], -1)
            attended, past = self._attend(x, m, start, past)
            states = states + attended
            x = self._norm(states, m + "post_attention_layernorm")
            x = silu(linear(x, self.w[m + "mlp.gate_proj.weight"])) * linear(x, self.w[m + "mlp.up_proj.weight"])
            states = states + linear(x, self.w[m + "mlp.down_proj.weight"])
            kept.append(past)
        normed = self._norm(states, "norm")
        return linear(normed, self.w["lm_head.weight"]), normed if self.config.norm_output else states, kept

    def _attend(self, x, m, start, cache):
        c = self.config
        q, k, v = (linear(x, self.w[f"{m}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, c.head_dim)).transpose(0, 1)
                   for n in "qkv")                                                   # [heads, T, head_dim]
        cos, sin = self.rotary(x, torch.arange(start, start + len(x))[None])
        q, k = (t * cos + torch.cat([-t[..., c.head_dim // 2:], t[..., :c.head_dim // 2]], -1) * sin for t in (q, k))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        mask = torch.ones(len(x), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(x))
        attended = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        return linear(attended.transpose(0, 1).flatten(1), self.w[m + "self_attn.o_proj.weight"]), (k, v)

    def _norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[name + ".weight"]


@torch.no_grad()
def compare(out, model, ids, aux, steps=3):
    """Largest difference between exported and trained logits, relative to the largest logit: over all positions of the
    first proposal, and over the further proposals of every eighth position, fed with the true tokens as in training."""
    draft = trainer.load_draft(out / "draft", model)
    held, own = load_file(out / "draft" / "model.safetensors"), draft.state_dict()
    different = {(k, v.shape) for k, v in held.items()} ^ {(k, v.shape) for k, v in own.items() if not k.startswith("verifier_")}
    if {name for name, _ in different} - ({"d2t", "t2d"} - held.keys()):
        raise RuntimeError(f"the draft's weights are not those that speculators loads: {sorted(different)}")
    seen = []
    hook = draft.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits[0]))
    trainer.unroll(draft, ids, aux, steps)
    hook.remove()
    n = len(ids) - 1
    served = Served(out / "sglang", draft.embed_tokens.weight)
    logits, states, cache = served.extend(ids[1:], aux[:-1])
    worst = (logits - seen[0]).abs().max()
    for j in range(0, n - steps, 8):
        state, part = states[j:j + 1], [tuple(t[:, :j + 1] for t in layer) for layer in cache]
        for k in range(1, steps):
            logits, state, part = served.decode(ids[j + 1 + k:j + 2 + k], state, j + k, part)
            worst = torch.maximum(worst, (logits[0] - seen[k][j]).abs().max())
    return (worst / seen[0].abs().max()).item()


def card(layout, config, target, facts):
    """README.md of an exported directory."""
    about = {"draft": ("speculators' own layout, which vLLM reads; speculators loaded it and gave these logits; **it was not tried in vLLM**", "vllm "
                       f"serve {target} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"DIRECTORY\", \"num_speculative_tokens\": 3}}'"),
             "sglang": ("SGLang's layout; its logits, computed as SGLang does, are the trainer's", f"python -m sglang.launch_server --model-path "
                        f"{target} " + " ".join(draft_flags("DIRECTORY", "3-1-4")))}[layout]
    rows = [("layers read", f"states entering {config['eagle_aux_hidden_state_layer_ids']}"), ("draft vocabulary", config["draft_vocab_size"]),
            ("draft layers", config["transformer_layer_config"]["num_hidden_layers"]), *facts]
    return (f"---\nbase_model: {target}\ntags: [eagle3, speculative-decoding]\n---\n# EAGLE-3 draft for {target}\n\nIn {about[0]}.\n\n"
            f"    {about[1]}\n\n| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)
            + "\nIt changes the speed of this one target, not its answers; it was trained with the target's own chat template.\n")
