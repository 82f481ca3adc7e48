"""A target for tests: a Llama with random weights, 8 layers of 64, a byte tokenizer and a ChatML template.

Its weights are large, so that its logits are far apart and near ties stay rare, and its final norm's gain is far from 1,
so that a state taken after the norm can't pass for one taken before.
"""
import json
import random

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tokenizer(path):
    """Write a byte tokenizer of 259 ids to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_ = Tokenizer(models.BPE({t: i for i, t in enumerate([*specials, *letters])}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(specials)
    PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token="<|endoftext|>", eos_token="<|im_end|>",
                            pad_token="<|endoftext|>", chat_template=TEMPLATE).save_pretrained(path)


def make(path, layers=8, hidden=64, positions=2048, **settings):
    """Write the model to `path` and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer(path)
    torch.manual_seed(0)
    config = LlamaConfig(**{"vocab_size": 320, "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": layers,
                            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": positions,
                            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.15,
                            "tie_word_embeddings": False, **settings})
    model = LlamaForCausalLM(config)
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def prepare(model, root, rows=30, longest=90):
    """Make `root`/02_prepare and `root`/03_extract, the inputs of 04, for rows of random ids; the states come from
    transformers, so no server is needed.  Returns `root`."""
    import torch
    from running import script
    from safetensors.torch import save_file

    import contract
    import states

    answers, extracted = root / "01_generate", root / "03_extract"
    rows = answer(answers, rows, longest)
    script("02_prepare", "--answers", answers, "--model", model, "--out", root / "02_prepare")
    extracted.mkdir()
    layers, target = contract.layer_ids(model), states.reference(model, torch.float32)
    for i, row in enumerate(rows):
        ids = row["prompt_ids"] + row["answer_ids"]
        save_file({"hidden_states": target(ids, layers).to(torch.bfloat16), "token_ids": torch.tensor(ids)},
                  states.file_of(extracted, i))
    contract.write(extracted, root / "02_prepare", layer_ids=layers, layer_meaning=contract.STATE, last_state=contract.LAST,
                   dtype="float32", engine="transformers")
    (extracted / "done.json").write_text("{}")
    return root


def answer(out, count, longest=90):
    """Make `out`, 01_generate's directory, with `count` rows of random ids, and return them."""
    draw = random.Random(0)
    out.mkdir(parents=True)
    rows = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "!"}],
             "finish_reason": "length", "prompt_ids": [draw.randrange(3, 250) for _ in range(10)],
             "answer_ids": [draw.randrange(3, 60) for _ in range(draw.randrange(20, longest))]} for i in range(count)]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "done.json").write_text("{}")
    return rows
