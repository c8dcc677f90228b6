"""Chat templates: the same string as Transformers, refusals in one line, and a sandbox that holds."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import support_text
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from support_text import build, directory_data, gguf_keys, tiny_byte_level
from tokenizers import Tokenizer

from fuel_core.contracts import TokenizerData
from fuel_core.contracts.errors import CheckpointError, FuelError, InvalidRequestError
from fuel_core.text import templates
from fuel_core.weights.gguf import open_gguf

qwen3_tokenizer_dir = support_text.qwen3_tokenizer_dir

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA3 = """{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools is defined and tools is none and ns.system %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ ns.system ~ '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- set header = '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' %}
    {{- header ~ (message.content | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""

GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}{% set role = 'model' %}
    {% else %}{% set role = message['role'] %}{% endif -%}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

FEATURES = """{%- set seen = namespace(n=0) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if seen.n >= 3 %}{% break %}{% endif %}
    {% set seen.n = seen.n + 1 %}
    {% generation %}
        {% set inner = message.content %}{{ inner | upper }}
    {% endgeneration %}
    {{ inner is defined }} {{ message | tojson }} {{ message | tojson(indent=2) }} {{ pad_token is defined }}
    {{ strftime_now('%Y') }} {{ documents is none }} {{ unk_token }} {{ dict(a=1) }}
    {{ messages[::-1][0].role }}
{% endfor %}
tail
"""

OWN = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "features": FEATURES}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|call|>"}

USER = {"role": "user", "content": " What's 'this'? <b>&\n{{ 1 + 1 }} é世 👩‍👧 "}
ASSISTANT = {"role": "assistant", "content": 'A "quoted" answer.\n\n'}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, list[dict[str, str]]] = {
    "one turn": [USER],
    "two turns": [USER, ASSISTANT, USER],
    "a system message": [SYSTEM, USER],
    "an answer last": [USER, ASSISTANT],
    "a further key": [{**USER, "name": "Ada"}],
    "empty content": [{"role": "user", "content": ""}],
    "roles that repeat": [USER, USER],
    "roles of its own": [{"role": "skip", "content": "x"}, SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
}


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_level(tmp_path_factory.mktemp("tiny"), post_processor=True)


@pytest.fixture(scope="module")
def theirs(tiny_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL)


@pytest.fixture(scope="module")
def ours(tiny_dir: Path) -> Any:
    cache: dict[str, Any] = {}

    def with_template(template: str) -> Any:
        if template not in cache:
            cache[template] = build(directory_data(tiny_dir, chat_template=template, **SPECIAL))
        return cache[template]

    return with_template


def our_text(tokenizer: Any, messages: Any, *, prompt: bool) -> str | None:
    """The rendered string, or None where the template refuses the messages."""
    try:
        return str(tokenizer.render_chat(messages, add_generation_prompt=prompt))
    except InvalidRequestError:
        return None


def their_text(tokenizer: Any, template: str, messages: Any, *, prompt: bool) -> str | None:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        )
    except TemplateError:
        return None


def assert_same(ours: Any, theirs: Any, template: str, messages: Sequence[dict[str, str]]) -> str | None:
    for prompt in (False, True):
        rendered = our_text(ours(template), messages, prompt=prompt)
        assert rendered == their_text(theirs, template, messages, prompt=prompt)
    return rendered


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", OWN.values(), ids=OWN.keys())
def test_every_style_renders_as_transformers_renders_it(
    ours: Any, theirs: Any, template: str, messages: list[dict[str, str]]
) -> None:
    assert_same(ours, theirs, template, messages)


def test_the_templates_render_some_chats_and_refuse_others(ours: Any, theirs: Any) -> None:
    assert assert_same(ours, theirs, MISTRAL, [USER, ASSISTANT]) is not None
    assert assert_same(ours, theirs, MISTRAL, [USER, USER]) is None
    assert assert_same(ours, theirs, GEMMA, [SYSTEM, USER]) is None


roles = st.sampled_from(["user", "assistant", "system", "tool"])
messages_of_any_text = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=30)}), min_size=1, max_size=4
)


@pytest.mark.parametrize("template", OWN.values(), ids=OWN.keys())
@given(messages=messages_of_any_text)
@settings(max_examples=40, deadline=None)
def test_any_messages_render_as_transformers_renders_them(
    ours: Any, theirs: Any, template: str, messages: list[dict[str, str]]
) -> None:
    assert_same(ours, theirs, template, messages)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
def test_the_real_smollm2_template_renders_as_transformers_renders_it(
    smollm2_path: Path, ours: Any, theirs: Any, messages: list[dict[str, str]]
) -> None:
    template = open_gguf(smollm2_path).tokenizer.chat_template
    assert template is not None
    rendered = assert_same(ours, theirs, template, messages)
    assert rendered is not None
    assert rendered.startswith("<|im_start|>system\n")


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
def test_the_real_qwen3_template_renders_as_transformers_renders_it(
    qwen3_tokenizer_dir: Path, ours: Any, theirs: Any, messages: list[dict[str, str]]
) -> None:
    template = directory_data(qwen3_tokenizer_dir).chat_template
    assert template is not None
    assert assert_same(ours, theirs, template, messages) is not None


def test_smollm2_conversations_encode_with_their_control_tokens(smollm2_path: Path) -> None:
    tokenizer = build(open_gguf(smollm2_path).tokenizer)
    ids = tokenizer.encode_chat([SYSTEM, {"role": "user", "content": "hi"}])
    assert ids == tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3, "its BOS is <|im_start|>: all three stay, and no fourth is added"


@pytest.mark.parametrize("template", [LLAMA3, CHATML], ids=["with BOS", "without BOS"])
def test_a_conversation_has_exactly_one_bos_whether_or_not_its_template_writes_one(
    ours: Any, template: str
) -> None:
    tokenizer = ours(template)
    assert tokenizer.adds_bos
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


def test_special_tokens_of_a_gguf_file_reach_its_template(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<pad>"]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 3}
    keys = gguf_keys(model="llama", tokens=tokens, scores=[0.0] * 4, **ids)
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}"
    assert build(TokenizerData(gguf=keys, chat_template=template)).render_chat([USER]) == "<s></s><unk><pad>"


def test_the_date_is_todays(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Frozen:
            return cls(2021, 3, 4, tzinfo=tz)

    monkeypatch.setattr(templates, "datetime", Frozen)
    assert ours("{{ strftime_now('%d %b %Y') }}").render_chat([USER]) == "04 Mar 2021"


# --- Refusals ---


def refused(tokenizer: Any, kind: type[FuelError], message: str, messages: Any = (USER,)) -> None:
    with pytest.raises(kind, match=message) as caught:
        tokenizer.render_chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_says_how_to_go_on(tiny_dir: Path, template: str | None) -> None:
    tokenizer = build(directory_data(tiny_dir, chat_template=template))
    assert not tokenizer.has_chat_template
    refused(
        tokenizer,
        InvalidRequestError,
        "no chat template.*instruction-tuned model, or give the prompt as plain",
    )


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ 1 +", "{% nonsense %}", "{{ x | no_such_filter }}", "{% generation %}x", "a\n{% if"],
)
def test_a_template_that_is_not_jinja_is_the_checkpoints_fault(ours: Any, template: str) -> None:
    tokenizer = ours(template)
    assert tokenizer.encode("plain prompts still work")
    refused(tokenizer, CheckpointError, "the chat template of the test's model cannot be used.*line [12]")


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ('' | attr('__class__')).mro() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('{0.__class__.__mro__}' | attr('format'))(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_leaves_its_sandbox_is_stopped(ours: Any, template: str) -> None:
    refused(ours(template), CheckpointError, "cannot be used.*(unsafe|not safe)")


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__ }}", "{{ raise_exception.__code__ }}", "{{ dict.mro }}"]
)
def test_what_lies_outside_the_sandbox_reads_as_nothing(ours: Any, template: str) -> None:
    assert ours(template).render_chat([USER]) == ""


def test_what_a_template_was_given_is_never_changed(ours: Any) -> None:
    messages = [dict(USER)]
    with pytest.raises(FuelError):
        ours("{{ messages[0].pop('role') }}").render_chat(messages)
    assert messages == [USER]


FAULTS = [
    ("{{ raise_exception('two\n\nlines') }}", "refuses: two lines"),
    ("{{ messages[7].content }}", "refuses: .*has no element 7"),
    ("{{ no_such_name.x }}", "'no_such_name' is undefined"),
    ("{{ 1 // 0 }}", "division"),
    ("{{ 'a' + 1 }}", "refuses"),
    ("{{ range(10000000) }}", "refuses"),
]


@pytest.mark.parametrize(("template", "message"), FAULTS)
def test_a_template_that_fails_on_the_messages_says_so_in_one_line(
    ours: Any, template: str, message: str
) -> None:
    refused(ours(template), InvalidRequestError, message)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        {"role": "user", "content": "x"},
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "tool_calls": []}],
        [USER, {"role": 1, "content": "x"}],
    ],
)
def test_malformed_messages_are_refused_before_the_template_runs(ours: Any, messages: Any) -> None:
    refused(
        ours("{{ raise_exception('it ran') }}"), InvalidRequestError, "^(no messages|messages? )", messages
    )
    with pytest.raises(InvalidRequestError) as caught:
        ours("{{ raise_exception('it ran') }}").render_chat(messages)
    assert "it ran" not in str(caught.value)
