"""Dump each prompt's hidden states from inside an SGLang server: one safetensors file a request.

Example, by the code that starts the server (SGLang patched by apply.py, patches/ on the server's PYTHONPATH)
    hooks = json.dumps(hidden_states_hook.forward_hooks("/dev/shm/staging", [2, 15, 27]))
    python -m sglang.launch_server ... --forward-hooks "$hooks" --disable-radix-cache   # no CUDA graphs: they skip it
    POST /generate {"input_ids": [300 ids], "rid": "hs-7-300-0", "sampling_params": {"max_new_tokens": 1}}

Reads   rid = hs-<row>-<number of tokens>-<attempt>; requests with any other rid are served and not dumped
Writes  OUT/<rid>.safetensors   hidden_states [T, K + 1, H] bfloat16: the states entering the K layers of layer_ids,
                                then the last layer's output before the final norm; token_ids [T] int64;
                                metadata: layer_ids, convention, last, sglang
        OUT/<rid>.err           in its place, one sentence: why this request has no states
Both appear by rename, so a file that is there is whole.

T tokens of a request, K captured layers, H hidden size, N rows of a batch (T of each prefilled request, then padding).
"""
import fnmatch
import importlib.metadata
import json
import logging
import re
from collections import OrderedDict
from pathlib import Path

NORM, LOGITS = "*model.norm", "*logits_processor"  # the star: some models keep their language model one level down
RID = re.compile(r"hs-([0-9]{1,12})-([0-9]{1,9})-([0-9]{1,9})")  # a rid names a file, so nothing else may pass
# A scheduler cuts one long prompt at a time into chunks: more unfinished ones are remains of aborted requests.
MAX_PARTIAL = 64
logger = logging.getLogger(__name__)
_pre_norm = []  # [N, H], the newest forward's last state before the final norm: from final_norm to dump


def forward_hooks(out, layer_ids):
    """What --forward-hooks wants, as a list for json.dumps.

    out is the folder for the files; layer_ids, ascending, mean the state ENTERING layer i (counted from 0), which is
    transformers' hidden_states[i] and speculators' convention.
    """
    if list(layer_ids) != sorted(set(layer_ids)) or not layer_ids or layer_ids[0] < 1:
        raise ValueError(f"layer ids must ascend from 1 or more, each once, and are {list(layer_ids)}")
    hooks = [("final_norm", NORM, {}), ("dump", LOGITS, {"out": str(out), "layer_ids": list(layer_ids)})]
    return [{"name": name, "target_modules": [pattern], "hook_factory": f"hidden_states_hook:{name}", "config": config}
            for name, pattern, config in hooks]


def model_of(config, pattern):
    """The served model, after a check that pattern finds one module of it; SGLang only warns if it finds none."""
    if "model" not in config:
        raise RuntimeError("this SGLang lacks the hidden-states patch: run `make patch`, then start the server again")
    found = [name for name, _ in config["model"].named_modules() if fnmatch.fnmatch(name, pattern)]
    if len(found) != 1:
        raise RuntimeError(f"hidden states need one module named {pattern}, and this model has {len(found)}: {found}")
    return config["model"]


def capture(model, layer_ids):
    """Make the model hand the states entering layer_ids to its logits processor.

    In SGLang an explicit id means that layer's OUTPUT, so i - 1 asks for the state entering i.  But a few models
    (deepseek_v2, glm4_moe_lite, gpt_oss) take some ids as they are, and None, the default, means [2, n/2, n-3] in most
    models and one more in minimax_m3_vl.  All store the outcome in `layers_to_capture`: the layers whose entering state
    they take.  So, in place of a list of models: ask, read back, ask the other way, read back, or refuse.
    """
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise RuntimeError(f"{type(model).__name__} can't hand out hidden states: it has no EAGLE-3 support")
    for request in ([i - 1 for i in layer_ids], list(layer_ids)):
        model.set_eagle3_layers_to_capture(request)
        stored = [list(ids) for ids in (getattr(m, "layers_to_capture", None) for m in model.modules()) if ids]
        if stored == [list(layer_ids)]:
            return
    raise RuntimeError(f"{type(model).__name__} can't capture the states entering layers {list(layer_ids)}: it stored "
                       f"{stored}; choose other layers, and leave pipeline parallelism off")


class Writer:
    """Puts one request's result where the client looks for it; synchronously: the server waits for the disk."""

    def __init__(self, out, metadata):
        self.out, self.metadata = Path(out), metadata
        self.out.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, rid, suffix, write):
        temporary = self.out / f".{rid}.tmp"
        try:
            write(temporary)
            temporary.replace(self.out / (rid + suffix))
        finally:
            temporary.unlink(missing_ok=True)

    def states(self, rid, states, ids):
        from safetensors.torch import save_file
        tensors = {"hidden_states": states, "token_ids": ids}
        self.publish(rid, ".safetensors", lambda path: save_file(tensors, path, self.metadata))

    def error(self, rid, sentence):
        logger.error("no hidden states for %s: %s", rid, sentence)
        try:
            self.publish(rid, ".err", lambda path: path.write_text(sentence + "\n"))
        except OSError as error:
            logger.error("%s.err can't be written: %s; the client will see no answer for it", rid, error)


class Dump:
    """The forward hook on the logits processor: cuts a batch into requests and joins the chunks of each."""

    def __init__(self, writer, num_layers):
        self.writer, self.num_layers = writer, num_layers
        self.partial = OrderedDict()  # rid -> ([states of a chunk, ...], [its ids, ...]), or None once it has failed

    def __call__(self, module, args, out):
        pre_norm = _pre_norm.pop() if _pre_norm else None
        ids, _, _, batch = args[:4]  # ids [N]
        if not batch.rids or not batch.forward_mode.is_extend():
            return
        aux = args[4] if len(args) > 4 else None  # K tensors [N, H] in a list, or packed [N, K * H]; None: not captured
        columns = [x for x in (*(aux if isinstance(aux, (list, tuple)) else [aux]), pre_norm) if x is not None]
        width = None if pre_norm is None else (self.num_layers + 1) * pre_norm.shape[-1]
        row = 0
        for rid, n, start in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu):
            rows, row = slice(row, row + n), row + n  # rows past the last request are padding
            match = RID.fullmatch(str(rid))
            if match is None or start >= int(match[2]):  # past its prompt: a request that decodes in a mixed batch
                continue
            if start == 0:
                self.partial[rid] = ([], [])
                self.partial.move_to_end(rid)
            try:
                self.chunk(rid, int(match[2]), start, n, [x[rows] for x in columns], ids[rows], width)
            except Exception as error:  # whatever it is (disk full, memory), it costs this request and not the server
                self.partial[rid] = None
                self.writer.error(rid, " ".join(str(error).split()) or type(error).__name__)
            while len(self.partial) > MAX_PARTIAL:
                self.partial.popitem(last=False)

    def chunk(self, rid, num_tokens, start, n, columns, ids, width):
        """Take tokens start .. start + n of a request: columns are views [n, ...] of the batch's states, ids is [n]."""
        import torch
        chunks = self.partial.get(rid, ([], []))
        if chunks is None:  # an earlier chunk failed, and its sentence says why
            return
        have = sum(len(c) for c in chunks[1])
        if start != have:
            raise ValueError(f"tokens {have} to {start} have no states; serve with --disable-radix-cache")
        if start + n > num_tokens:
            raise ValueError(f"the prompt has {start + n} tokens or more, and its rid says {num_tokens}")
        if width is None or sum(x.shape[-1] for x in columns) != width or any(len(x) != n for x in columns):
            raise ValueError(f"wanted {self.num_layers} captured layers and the last state of {n} tokens, the model "
                             f"gave {[list(x.shape) for x in columns]}: are the layer ids below the number of layers?")
        # Both lines copy.  A view would keep the whole batch in memory (on a CPU .cpu() copies nothing), and the server
        # fills the buffer behind ids again.
        chunks[0].append(torch.cat(columns, -1).to(torch.bfloat16).view(n, self.num_layers + 1, -1).cpu())
        chunks[1].append(ids.to(torch.int64, copy=True).cpu())
        if start + n == num_tokens:
            del self.partial[rid]
            self.writer.states(rid, torch.cat(chunks[0]), torch.cat(chunks[1]))


def final_norm(config):
    """Hook factory for the final norm: keeps its input, the last layer's state, for dump."""
    model_of(config, NORM)

    def hook(module, args, out):
        # SGLang's norm adds the residual itself and returns (normed, sum); without residual its input is the state.
        _pre_norm[:] = [out[1] if isinstance(out, tuple) else args[0]]
    return hook


def dump(config):
    """Hook factory for the logits processor, which sees the ids, the captured states and the batch's layout."""
    from sglang.srt.distributed.parallel_state import get_attn_tensor_model_parallel_rank
    capture(model_of(config, LOGITS), config["layer_ids"])
    # All ranks of a tensor-parallel group hold the same states; under data-parallel attention each group has requests
    # of its own, hence the attention group's rank.
    if get_attn_tensor_model_parallel_rank() != 0:
        return lambda module, args, out: None
    metadata = {"layer_ids": json.dumps(config["layer_ids"]), "convention": "state entering layer i",
                "last": "pre_norm", "sglang": importlib.metadata.version("sglang")}
    return Dump(Writer(config["out"], metadata), len(config["layer_ids"]))


final_norm.wants_model = dump.wants_model = True
