"""Hidden-state files: hs_{row}.safetensors in speculators' layout, checked before they are published.

    hidden_states  bfloat16 [T, 4, H]   states entering three layers, then the last state before the final norm
    token_ids      int64 [T]            equal to the dataset's input_ids of that row
"""
import os
from pathlib import Path

from stage import Refused


def file_of(directory, row):
    return Path(directory) / f"hs_{row}.safetensors"


def intact(path, ids, hidden_size):
    """Whether a published file is whole and holds these ids.  Reads the header (whose offsets must add up to the file's
    size) and the ids, not the states: what was published has been checked in full."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shape = file.get_slice("hidden_states").get_shape()
            return shape == [len(ids), 4, hidden_size] and torch.equal(file.get_tensor("token_ids"), torch.tensor(ids))
    except (OSError, SafetensorError):
        return False


def check(path, ids, hidden_size):
    """Load a freshly written file; return {"hidden_states", "token_ids"} or raise Refused with what is wrong."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data = load_file(path)
    except SafetensorError as error:
        raise Refused(f"{path.name} can't be read ({error})") from None
    if not {"hidden_states", "token_ids"} <= data.keys():
        raise Refused(f"{path.name} holds {sorted(data)}, wanted hidden_states and token_ids")
    states, found = data["hidden_states"], data["token_ids"]
    if not torch.equal(found, torch.tensor(ids)):
        raise Refused(f"{path.name} holds other token ids than those sent: {found[:8].tolist()}... for {ids[:8]}...")
    if tuple(states.shape) != (len(ids), 4, hidden_size) or states.dtype != torch.bfloat16:
        raise Refused(f"{path.name} holds {states.dtype} {list(states.shape)}, wanted bfloat16 {[len(ids), 4, hidden_size]}")
    if not torch.isfinite(states).all():
        raise Refused(f"{path.name} holds values that are not finite")
    return data


def publish(source, destination):
    """Move a checked file into place on the same disk; it is on the disk before its name is."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, destination)


class Head:
    """The target's final norm and language-model head: states before the norm [T, H] to logits [T, V].

    The layers come from the checkpoint alone (speculators' loader knows tied, sharded and nested ones), so a target
    of any size can be asked.  Computed in float32.
    """

    def __init__(self, model):
        import torch
        from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
        from speculators.utils.loading import load_model_layers

        import contract

        config = contract.text_config(model)
        if config.model_type in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES:
            raise Refused(f"{model}: {config.model_type} scales its final norm by 1 + w, which speculators' EAGLE-3 does "
                          "not know; its targets would be wrong without an error")
        weights = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(model))
        self.norm = weights["model.norm.weight"].float()
        self.head = weights.get("lm_head.weight", weights.get("embed_tokens.weight")).float()
        self.eps = config.rms_norm_eps
        self.torch = torch

    def logits(self, states):
        states = states.float()
        scale = self.torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return (states * scale * self.norm) @ self.head.T


def reference_device(model, allowed=("cuda", "cpu")):
    """Where transformers can hold the target in float32 within half of the free memory: "cuda", "cpu" or None."""
    import psutil
    import torch

    size = 2 * sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    if "cuda" in allowed and torch.cuda.is_available() and size < torch.cuda.mem_get_info()[0] / 2:
        return "cuda"
    return "cpu" if size < psutil.virtual_memory().available / 2 else None


def reference(model, dtype, device="cpu"):
    """A function (ids [T], layer ids) -> states [T, 4, H] (float32, on `device`) computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval().to(device)
    last = []
    target.get_decoder().norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))

    @torch.no_grad()
    def states(ids, layer_ids):
        last.clear()
        hidden = target(torch.tensor([ids], device=device), output_hidden_states=True).hidden_states
        return torch.stack([hidden[i][0] for i in layer_ids] + [last[0][0]], dim=1).float()

    return states


def token_errors(states, wanted):
    """Relative error of each token and slot [T, 4]: |a - b| / |b| over H."""
    return (states.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
