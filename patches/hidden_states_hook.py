"""Dump each prompt's hidden states from inside an SGLang server: one safetensors file a request.

Example, by the code that starts the server (SGLang patched by apply.py, patches/ on the server's PYTHONPATH)
    hooks = json.dumps(hidden_states_hook.forward_hooks("/dev/shm/staging", [2, 15, 27]))
    python -m sglang.launch_server ... --forward-hooks "$hooks" --disable-radix-cache   # no CUDA graphs: they skip it
    POST /generate {"input_ids": [300 ids], "rid": "hs-7-300-0", "sampling_params": {"max_new_tokens": 1}}
    python patches/hidden_states_hook.py /dev/shm/staging 2 15 27      # prints the hooks, for a server started by hand

Reads   rid = hs-<row>-<number of tokens>-<attempt>, or hs8-... for fp8; any other rid is served and not dumped
Writes  OUT/<rid>.safetensors   token_ids [T] int64; hidden_states [T, K + 1, H] bfloat16: the states entering the K
                                layers of layer_ids, then the last layer's output before the final norm; for fp8
                                float8_e4m3fn with hidden_states_scales [T, 1, 1] float32 (hs-connectors' layout);
                                metadata: layer_ids, convention, last, sglang
        OUT/<rid>.err           in its place, one sentence: why this request has no states
Both appear by rename, so a file that is there is whole.  They appear after the reply, which does not wait for the disk.

T tokens of a request, K captured layers, H hidden size, N rows of a batch (T of each prefilled request, then padding).
"""
import fnmatch
import importlib.metadata
import json
import logging
import queue
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count
from pathlib import Path

NORM, LOGITS = "*model.norm", "*logits_processor"  # the star: some models keep their language model one level down
RID = re.compile(r"(hs|hs8)-([0-9]{1,12})-([0-9]{1,9})-([0-9]{1,9})")  # a rid names a file, so nothing else may pass
# A scheduler cuts one long prompt at a time into chunks: more unfinished ones are remains of aborted requests.
MAX_PARTIAL = 64
SLOT, SLOTS = 32 << 20, 32  # the ring: 1 GiB, a second of states at 32,000 tokens/s of a hidden size of 4,096
THREADS = 2                 # one writes 1 to 2 GB/s into memory
PATIENCE = 100.0            # seconds that one forward waits for the disk; the server's watchdog gives up after 300
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


class Request:
    """A prompt on its way into a file, which opens with its first tokens and gets its name with the last ones."""

    def __init__(self, rid, temporary, thread, fp8, num_tokens):
        self.rid, self.temporary, self.thread, self.fp8, self.num_tokens = rid, temporary, thread, fp8, num_tokens
        self.taken = self.written = 0  # tokens that the hook has seen, and that are in the file
        self.failed, self.file = False, None

    def open(self, shape, metadata):
        """Write the header for states of `shape` (K + 1, H) a token; safetensors' own writer wants all of them in memory."""
        fields = [("token_ids", "I64", [], 8), *([("hidden_states_scales", "F32", [1, 1], 4)] if self.fp8 else []),
                  ("hidden_states", "F8_E4M3" if self.fp8 else "BF16", shape, shape[0] * shape[1] * (1 if self.fp8 else 2))]
        header, ends = {"__metadata__": metadata}, [0, *accumulate(width * self.num_tokens for *_, width in fields)]
        for (name, dtype, tail, _), *offsets in zip(fields, ends, ends[1:]):
            header[name] = {"dtype": dtype, "shape": [self.num_tokens, *tail], "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.places = [(8 + len(text) + start, width) for start, (*_, width) in zip(ends, fields)]  # width: bytes a token
        self.file = open(self.temporary, "wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def drop(self):
        """Remove what is in the file: the request was aborted or has failed."""
        self.failed = True
        try:
            if self.file:
                self.file.close()
        except OSError:  # a full disk once more
            pass
        self.temporary.unlink(missing_ok=True)


class Writer:
    """Brings states from the device into files beside the server's own work.

    put() copies tokens into slots of a ring of fixed size, on CUDA pinned and by a stream of its own, and returns; threads
    write the slots to disk.  So memory is bounded, and a slow disk slows the server down, at most PATIENCE a forward.
    A request keeps to one thread, which makes its writes follow each other.
    """

    def __init__(self, out, metadata, cuda=False, patience=PATIENCE):
        import torch
        self.out, self.metadata, self.patience = Path(out), metadata, patience
        self.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stream = torch.cuda.Stream() if cuda else None
        self.free, self.serial = queue.LifoQueue(), count()  # last in, first out: memory never used is never touched
        for _ in range(SLOTS):
            self.free.put(torch.empty(SLOT, dtype=torch.uint8, pin_memory=cuda))
        self.threads = [ThreadPoolExecutor(1) for _ in range(THREADS)]

    def request(self, rid, fp8, num_tokens):
        n = next(self.serial)
        return Request(rid, self.out / f".{rid}.{n}.tmp", self.threads[n % THREADS], fp8, num_tokens)

    def put(self, request, ids, columns, shape, until):
        """Take n more tokens of a request: ids [n], columns views [n, ...] of states [n, *shape] in parts; no later than
        `until`.  Returns before they are written."""
        import torch
        step = SLOT // (12 + 2 * shape[0] * shape[1])
        for a in range(0, len(ids), step):
            try:
                slot = self.free.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the disk of {self.out} took nothing for {self.patience:.0f} s") from None
            try:  # both lines copy: the server fills these buffers again
                tensors = [ids[a:a + step].to(torch.int64, copy=True),
                           torch.cat([x[a:a + step] for x in columns], -1).to(torch.bfloat16).view(-1, *shape)]
                if request.fp8:
                    from hs_connectors.fp8_utils import quantize_tensor_to_fp8
                    tensors[1:] = reversed(quantize_tensor_to_fp8(tensors[1]))
                ready = self.copy([x.flatten().view(torch.uint8) for x in tensors], slot)
            except BaseException:
                self.free.put(slot)
                raise
            request.thread.submit(self.write, request, len(tensors[0]), shape, slot, ready)

    def copy(self, tensors, slot):
        """Lay bytes end to end into the slot; on CUDA returns the event that says when."""
        import torch
        parts = slot[:sum(map(len, tensors))].split([len(x) for x in tensors])
        if self.stream is None:
            for part, x in zip(parts, tensors):
                part.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for part, x in zip(parts, tensors):
                part.copy_(x, non_blocking=True)
                x.record_stream(self.stream)
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        return ready

    def write(self, request, n, shape, slot, ready):
        """In the request's thread: n tokens out of a slot into its file, and its name with the last of them."""
        try:
            if ready:
                ready.synchronize()
            if request.failed:
                return
            if request.file is None:
                request.open(shape, self.metadata)
            data, at = memoryview(slot.numpy()), 0
            for offset, width in request.places:
                request.file.seek(offset + request.written * width)
                request.file.write(data[at:at + n * width])
                at += n * width
            request.written += n
            if request.written == request.num_tokens:
                request.file.close()
                request.temporary.replace(self.out / f"{request.rid}.safetensors")
        except Exception as error:  # whatever it is (disk full, memory), it costs this request and not the server
            self.error(request, error)
        finally:
            self.free.put(slot)

    def fail(self, request, error):
        request.failed = True
        request.thread.submit(self.error, request, error)

    def error(self, request, error):
        """In the request's thread: OUT/<rid>.err, which the client looks for."""
        sentence = " ".join(str(error).split()) or type(error).__name__
        logger.error("no hidden states for %s: %s", request.rid, sentence)
        try:
            request.drop()
            request.temporary.write_text(sentence + "\n")
            request.temporary.replace(self.out / f"{request.rid}.err")
        except OSError as error:
            logger.error("%s.err can't be written: %s; the client will see no answer for it", request.rid, error)


class Dump:
    """The forward hook on the logits processor: cuts a batch into requests and joins the chunks of each."""

    def __init__(self, writer, num_layers):
        self.writer, self.num_layers = writer, num_layers
        self.partial = OrderedDict()  # rid -> Request of which the last token has not come

    def __call__(self, module, args, out):
        pre_norm = _pre_norm.pop() if _pre_norm else None
        ids, _, _, batch = args[:4]  # ids [N]
        if not batch.rids or not batch.forward_mode.is_extend():
            return
        aux = args[4] if len(args) > 4 else None  # K tensors [N, H] in a list, or packed [N, K * H]; None: not captured
        columns = [x for x in (*(aux if isinstance(aux, (list, tuple)) else [aux]), pre_norm) if x is not None]
        hidden_size = None if pre_norm is None else pre_norm.shape[-1]
        row, until = 0, time.monotonic() + self.writer.patience
        for rid, n, start in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu):
            rows, row = slice(row, row + n), row + n  # rows past the last request are padding
            match = RID.fullmatch(str(rid))
            if match is None or start >= int(match[3]):  # past its prompt: a request that decodes in a mixed batch
                continue
            if start == 0 or rid not in self.partial:
                self.forget(rid)
                self.partial[rid] = self.writer.request(rid, match[1] == "hs8", int(match[3]))
            request = self.partial[rid]
            try:
                if not request.failed:  # else an earlier chunk did, and its sentence says why
                    self.chunk(request, start, n, [x[rows] for x in columns], ids[rows], hidden_size, until)
            except Exception as error:
                self.writer.fail(request, error)
            while len(self.partial) > MAX_PARTIAL:
                self.forget(next(iter(self.partial)))

    def forget(self, rid):
        request = self.partial.pop(rid, None)
        if request is not None and not request.failed:
            request.failed = True
            request.thread.submit(request.drop)

    def chunk(self, request, start, n, columns, ids, hidden_size, until):
        """Take tokens start .. start + n of a request: columns are views [n, ...] of the batch's states, ids is [n]."""
        if start != request.taken:
            raise ValueError(f"tokens {request.taken} to {start} have no states; serve with --disable-radix-cache")
        if start + n > request.num_tokens:
            raise ValueError(f"the prompt has {start + n} tokens or more, and its rid says {request.num_tokens}")
        shape = (self.num_layers + 1, hidden_size)
        if (hidden_size is None or sum(x.shape[-1] for x in columns) != shape[0] * shape[1]
                or any(len(x) != n for x in columns)):
            raise ValueError(f"wanted {self.num_layers} captured layers and the last state of {n} tokens, the model "
                             f"gave {[list(x.shape) for x in columns]}: are the layer ids below the number of layers?")
        self.writer.put(request, ids, columns, shape, until)
        request.taken += n
        if request.taken == request.num_tokens:
            del self.partial[request.rid]


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
    from sglang.srt.runtime_context import get_server_args
    server = get_server_args()
    for name, wanted in {"pp_size": 1, "speculative_algorithm": None, "disaggregation_mode": "null"}.items():
        if getattr(server, name) != wanted:
            raise RuntimeError(f"hidden states need a server with {name} = {wanted}, this one has {getattr(server, name)}")
    model = model_of(config, LOGITS)
    capture(model, config["layer_ids"])
    # All ranks of a tensor-parallel group hold the same states; under data-parallel attention each group has requests
    # of its own, hence the attention group's rank.
    if get_attn_tensor_model_parallel_rank() != 0:
        return lambda module, args, out: None
    metadata = {"layer_ids": json.dumps(config["layer_ids"]), "convention": "state entering layer i",
                "last": "pre_norm", "sglang": importlib.metadata.version("sglang")}
    cuda = any(weight.is_cuda for weight in model.parameters())
    writer = Writer(config["out"], metadata, cuda, min(PATIENCE, (server.watchdog_timeout or 300) / 3))
    return Dump(writer, len(config["layer_ids"]))


final_norm.wants_model = dump.wants_model = True

if __name__ == "__main__":
    import sys
    print(json.dumps(forward_hooks(sys.argv[1], [int(i) for i in sys.argv[2:]])))
