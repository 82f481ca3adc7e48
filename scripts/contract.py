"""contract.json: the one convention that every stage reads, completes and checks.

02 writes the target, its tokenizer, chat template, end-of-turn ids and the special ids that are trained; 03 adds the
layers, their meaning, the precision and the engine; 04 adds the draft's norms and vocabulary.  A stage that disagrees
stops and shows both values.
"""
import json

import stage
from stage import Refused

STATE = "state entering layer i"  # transformers' hidden_states[i]; SGLang's explicit ids mean the output of layer i, one less
LAST = "pre-norm"                 # speculators >= 0.4 applies the final norm itself; SGLang and transformers store post-norm


def write(out, upstream=None, **entries):
    """Write OUT/contract.json: that of the `upstream` stage and what this stage adds."""
    entries = {**(read(upstream) if upstream else {}), **entries}
    stage.write(out / "contract.json", json.dumps(entries, indent=1) + "\n")
    return entries


def read(directory):
    return json.loads((directory / "contract.json").read_text())


def check(directory, **wanted):
    """Refuse if the contract of a stage names other values than these."""
    found = read(directory)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise Refused(f"{directory}/contract.json says {name} = {found.get(name)}, but here it is {value}")
    return found


def tokenizer_hash(model):
    """Identity of the tokenizer's files, whatever the weights."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    return " ".join(f"{n}:{stage.identity(model / n)}" for n in names if (model / n).exists())


def text_config(model):
    """The target's language-model config (nested under text_config in multimodal models); Refused if unreadable."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise Refused(f"{model}: config.json can't be used ({str(error).splitlines()[0]})") from None
    return getattr(config, "text_config", config)


def layer_ids(model, chosen=None):
    """The three layers whose entering states the draft reads: [2, n/2, n-3] of n, or those chosen."""
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

    n, kind = text_config(model).num_hidden_layers, text_config(model).model_type
    if kind in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES:
        raise Refused(f"{model}: {kind} scales its final norm by 1 + w, which speculators' EAGLE-3 does not know; its targets would be "
                      "wrong without an error")
    ids = list(chosen or [2, n // 2, n - 3])
    if ids != sorted(set(ids)) or ids[0] < 1 or ids[-1] >= n:
        raise Refused(f"layer ids {ids} of {n} layers: wanted rising numbers from 1 to {n - 1}; name others with --layer-ids")
    if ids[0] != 2 and kind.startswith(("deepseek", "kimi", "glm4_moe_lite")):
        raise Refused(f"layer ids {ids}: SGLang shifts the layers of {kind} only if the first is 2, "
                      "so it would serve the draft with other ones")
    return ids
