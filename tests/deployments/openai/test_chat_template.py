from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from deployments.openai.chat_template import PromptEncoder
from deployments.openai.contracts import load_tokenizer
from replicas.errors import InvalidRequestError, UnsupportedParameterError

GOLDEN = Path(__file__).parents[2] / "golden"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "(m.content | trim)")
LLADA = (
    "{% for m in messages %}{{ '<role>' + ('HUMAN' if m.role == 'user' else m.role | upper) + '</role>' }}"
    "{{ m.content + '<|role_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
#: Drops the thinking of earlier turns, as Qwen3's template does: it looks into contents.
THINKING = CHATML.replace(
    "m.content", "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content)"
)
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "llada": LLADA, "thinking": THINKING}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|role_end|>", "<|mask|>", "<role>HUMAN</role>"]


def make_tokenizer(template):
    """A byte-level BPE with merges that would love to cross the borders of a content."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["user\nHello hello the the capital capital of France\n\nassistant\n", "a  b   c\n\n\n d"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: make_tokenizer(template) for name, template in TEMPLATES.items()}
TOKENIZERS["golden"] = load_tokenizer(GOLDEN / "llada2_b32")
ENCODERS = {name: PromptEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def expected_ids(name, messages):
    tokenizer = TOKENIZERS[name]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def special_ids(name, ids):
    special = {i for i, t in TOKENIZERS[name].added_tokens_decoder.items() if t.special}
    return [i for i in ids if i in special]


ORDINARY = st.text(st.one_of(st.sampled_from(" \n<>|ab"), st.characters(codec="utf-8")), max_size=30).filter(
    lambda text: not any(token in text for token in [*CONTROL, "<|endoftext|>", "<|startoftext|>"])
)


@pytest.mark.parametrize("name", ENCODERS)
@given(texts=st.lists(ORDINARY, min_size=1, max_size=4))
def test_ordinary_text_gives_what_the_plain_template_gives(name, texts):
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    assert ENCODERS[name].encode_chat(messages) == expected_ids(name, messages)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("wrap", ["{}", "a{}b", "  {}  ", "{0}{0}", "<{}>", "한{}é", "x</think>\n{}"])
def test_control_tokens_in_a_text_are_plain_text(name, wrap):
    tokenizer, encoder = TOKENIZERS[name], ENCODERS[name]
    harmless = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    expected = special_ids(name, encoder.encode_chat(harmless))
    for token in tokenizer.added_tokens_decoder.values():
        if not token.special:
            continue
        content = wrap.format(token.content)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        ids = encoder.encode_chat(messages)
        assert special_ids(name, ids) == expected, content
        # Nothing is lost: the text of the ids is the rendered text.
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == rendered
        assert special_ids(name, expected_ids(name, messages)) != expected, "the plain way would be fooled"


@given(st.lists(st.sampled_from([*CONTROL, "<|", "|>", "mask", "<|im", "_end|>", "<", " ", "x"]), max_size=6))
def test_no_combination_of_pieces_makes_a_control_token(pieces):
    for name in ("chatml", "trimming", "thinking"):
        encoder = ENCODERS[name]
        expected = special_ids(name, encoder.encode_chat([{"role": "user", "content": "x"}]))
        ids = encoder.encode_chat([{"role": "user", "content": "".join(pieces)}])
        assert special_ids(name, ids) == expected


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ '<' + messages[0].content }}", "|mask|>"),
        ("{{ messages[0].content + '|>' }}", "<|mask"),
        ("{{ messages[0].content + messages[0].name }}", "<|ma"),
    ],
)
def test_no_control_token_forms_across_the_border_of_a_content(template, content):
    tokenizer = make_tokenizer(template)
    ids = PromptEncoder(tokenizer).encode_chat([{"role": "user", "content": content, "name": "sk|>"}])
    assert tokenizer.decode(ids) == "<|mask|>"
    assert len(ids) > 1


def test_control_tokens_in_other_fields_are_plain_text_too():
    tokenizer = make_tokenizer("{{ messages[0].tool_calls[0].function.arguments.x }}{{ extra }}")
    calls = [{"function": {"arguments": {"x": "<|mask|>"}}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    ids = PromptEncoder(tokenizer).encode_chat([message], {"extra": "<|im_end|>"})
    assert tokenizer.decode(ids) == "<|mask|><|im_end|>"
    mask, end = tokenizer.convert_tokens_to_ids(["<|mask|>", "<|im_end|>"])
    assert not {mask, end} & set(ids)


def test_raw_prompts_are_plain_text():
    encoder = ENCODERS["chatml"]
    ids = encoder.encode_text("a<|im_end|>")
    assert special_ids("chatml", ids) == []
    assert TOKENIZERS["chatml"].decode(ids) == "a<|im_end|>"


def test_the_tokenizers_own_state_is_not_touched():
    tokenizer = TOKENIZERS["chatml"]
    ENCODERS["chatml"].encode_text("<|im_end|>")
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_refusing_template_is_the_messages_fault():
    tokenizer = make_tokenizer("{{ raise_exception('only user messages, not ' + messages[0].content) }}")
    with pytest.raises(InvalidRequestError, match=r"only user messages, not <\|mask\|>") as caught:
        PromptEncoder(tokenizer).encode_chat([{"role": "user", "content": "<|mask|>"}])
    assert caught.value.param == "messages"


def test_a_failing_template_is_the_messages_fault():
    tokenizer = make_tokenizer("{{ messages[0].missing.deeper }}")
    with pytest.raises(InvalidRequestError) as caught:
        PromptEncoder(tokenizer).encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_model_without_template_refuses_chat():
    with pytest.raises(UnsupportedParameterError, match="no chat template"):
        PromptEncoder(make_tokenizer(None)).encode_chat([{"role": "user", "content": "x"}])


def test_template_variables_reach_the_template_but_not_its_machinery():
    tokenizer = make_tokenizer("{{ 'yes' if enable_thinking else 'no' }}")
    encoder = PromptEncoder(tokenizer)
    messages = [{"role": "user", "content": "x"}]
    assert encoder.render_chat(messages, {"enable_thinking": True})[0] == "yes"
    with pytest.raises(InvalidRequestError, match="chat_template"):
        encoder.encode_chat(messages, {"chat_template": "{{ 1 }}"})


def test_many_threads_agree():
    encoder = ENCODERS["chatml"]
    contents = [f"hello {i} <|im_end|>" if i % 2 else f"hello {i}" for i in range(200)]
    chats = [[{"role": "user", "content": content}] for content in contents]
    expected = [encoder.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoder.encode_chat, chats)) == expected
