"""A target for tests: a Llama with random weights, 8 layers of 64, a byte tokenizer and a ChatML template.

Its weights are large, so that its logits are far apart and near ties stay rare, and its final norm's gain is far from 1,
so that a state taken after the norm can't pass for one taken before.
"""
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make(path, layers=8, hidden=64):
    """Write the model to `path` and return it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_ = Tokenizer(models.BPE({t: i for i, t in enumerate([*specials, *letters])}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens(specials)
    PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token="<|endoftext|>", eos_token="<|im_end|>",
                            pad_token="<|endoftext|>", chat_template=TEMPLATE).save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, hidden_size=hidden, intermediate_size=128, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, bos_token_id=0,
                         eos_token_id=2, pad_token_id=None, initializer_range=0.15, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
    model.to(torch.bfloat16).save_pretrained(path)
    return path
