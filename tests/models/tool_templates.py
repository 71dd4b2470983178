"""Small chat templates in the form of the real ones, at least one for each format of tool calls.

Each writes the calls of an answer as the named source does. Sources of a repository have the commit
that was read; those of a model or a package are its published template and documentation.
"""

from __future__ import annotations

from jaxserve.models import tool_calls
from jaxserve.models.tool_calls import ToolFormat

# Before and after an answer.
BEGIN, END = "<|answer|>", "<|over|>"
_TEMPLATE = (
    "{% if tools %}{# OFFER #}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    f"{BEGIN}CALLS{END}"
    "{% endif %}{% endfor %}"
)
_CALLS = "{% for c in m.tool_calls %}{% set f = c.function %}EACH{% endfor %}"
_NEXT = "{% if not loop.last %}SEPARATOR{% endif %}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_MACRO = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v | dictsort %}{{ k }}:{{ value(x) }}{% if not loop.last %},{% endif %}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}{{ value(x) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)


def _template(each: str, *, before: str = "{{ m.content }}", after: str = "") -> str:
    return _TEMPLATE.replace("CALLS", before + _CALLS.replace("EACH", each) + after)


def _joined(each: str, separator: str) -> str:
    return each + _NEXT.replace("SEPARATOR", separator)


def _gemma(quote: str, begin: str, end: str) -> str:
    each = begin + "call:{{ f.name }}{{ value(f.arguments) }}" + end
    return _MACRO.replace("QUOTE", quote) + _template(each)


_ITEMS = "{% for k, v in f.arguments.items() %}ITEM{% endfor %}"
_QWEN = (
    "{% set v = v | tojson if v is mapping or (v is sequence and v is not string)"
    " else v | string %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
)
_GLM = (
    "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n"
)
_SEED = "<parameter={{ k }}>{{ v | tojson if v is not string else v }}</parameter>\n"
_MINIMAX = '<parameter name="{{ k }}">{{ v | tojson if v is not string else v }}</parameter>\n'
_MARKED = (
    '{% if not loop.first %}\n{% endif %}<｜MARK｜parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</｜MARK｜parameter>"
)


def _marked(mark: str, block: str, *, before: str, empty: str) -> str:
    """Return a template of calls whose tags all have a mark; `empty` is a call's lack of values."""
    each = f'<｜{mark}｜invoke name="{{{{ f.name }}}}">\n'
    each += f"{{% if f.arguments %}}{_ITEMS.replace('ITEM', _MARKED.replace('MARK', mark))}\n"
    each += f"{{% else %}}{empty}{{% endif %}}</｜{mark}｜invoke>"
    begin, end = f"<｜{mark}｜{block}>\n", f"\n</｜{mark}｜{block}>"
    return _template(_joined(each, "\n"), before=f"{before}{begin}", after=end)


_PYTHON = (
    "{{ k }}={% if v is boolean or v is none %}{{ v }}{% else %}{{ v | tojson }}{% endif %}"
    "{% if not loop.last %}, {% endif %}"
)

# Whose template has this form, where it was read, and the template.
TEMPLATES: list[tuple[str, str, ToolFormat, str]] = [
    (
        "Qwen2.5, Qwen3, Granite 4",
        "Qwen/Qwen3-8B tokenizer_config.json",
        tool_calls.HERMES,
        _template("\n<tool_call>\n" + _JSON + "\n</tool_call>"),
    ),
    (
        "Hermes 2 Pro",
        "vllm 66aa580 examples/tool_chat_template_hermes.jinja",
        tool_calls.HERMES,
        _template(
            '\n<tool_call>\n{ "arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}'
            "\n</tool_call> ",
            before="",
        ),
    ),
    (
        "SmolLM2",
        "jaxserve.models.tool_calls.with_instruction",
        tool_calls.LIST,
        _template(
            _joined(_JSON, ", "), before="{{ m.content }}<tool_call>[", after="]</tool_call>"
        ).replace("{% if tools %}{# OFFER #}{% endif %}", ""),
    ),
    (
        "SmolLM3",
        "HuggingFaceTB/SmolLM3-3B chat_template.jinja, the xml_tools part",
        tool_calls.HERMES,
        _template("<tool_call>" + _JSON + "</tool_call>"),
    ),
    (
        "Mistral 7B v0.3",
        "mistralai/Mistral-7B-Instruct-v0.3 tokenizer_config.json",
        tool_calls.MISTRAL,
        _template(
            _joined(_JSON[:-1] + ', "id": "{{ c.id }}"}', ", "),
            before="{{ m.content }}[TOOL_CALLS] [",
            after="]",
        ),
    ),
    (
        "Ministral 3, Devstral 2",
        "mistral-common 1.11.7 tests/data/chat_templates/v13.jinja",
        tool_calls.MISTRAL_ARGS,
        _template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    ),
    (
        "Mistral Small 3.2",
        "mistral-common 1.11.7 tests/data/chat_templates/v11.jinja",
        tool_calls.MISTRAL_ARGS,
        _template("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    ),
    (
        "Llama 3.1, 3.2",
        "meta-llama/Llama-3.1-8B-Instruct tokenizer_config.json",
        tool_calls.LLAMA3,
        _template(
            _joined('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "; "),
            before="",
        ),
    ),
    (
        "Llama 3.2, Llama 4 with Python",
        "vllm 0471aed examples/tool_chat_template_llama4_pythonic.jinja",
        tool_calls.PYTHONIC,
        "{# [func_name1( #}"
        + _template(
            _joined("{{ f.name }}(" + _ITEMS.replace("ITEM", _PYTHON) + ")", ", "),
            before="[",
            after="]",
        ),
    ),
    (
        "Granite 3",
        "vllm 5c1f5d1 vllm/parser/granite.py",
        tool_calls.GRANITE,
        _template(_joined(_JSON, ", "), before="<|tool_call|>[", after="]"),
    ),
    (
        "LFM2",
        "llama.cpp 6f4e9f5 models/templates/LFM2.5-8B-A1B.jinja",
        tool_calls.LFM2,
        _template(
            _joined("{{ f.name }}(" + _ITEMS.replace("ITEM", _PYTHON) + ")", ", "),
            before="{{ m.content }}<|tool_call_start|>[",
            after="]<|tool_call_end|>",
        ),
    ),
    (
        "Nemotron Nano 2",
        "llama.cpp f01caef models/templates/NVIDIA-Nemotron-Nano-v2.jinja",
        tool_calls.NEMOTRON,
        _template(_joined(_JSON, ", "), before="{{ m.content }}<TOOLCALL>[", after="]</TOOLCALL>"),
    ),
    (
        "Command A, R7B",
        "llama.cpp 041462b models/templates/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
        tool_calls.COMMAND,
        _template(
            '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
            '"parameters": {{ f.arguments | tojson }}}{% if not loop.last %},{% endif %}\n',
            before="<|START_ACTION|>[",
            after="]<|END_ACTION|>",
        ),
    ),
    (
        "Seed-OSS",
        "llama.cpp b1933d3 models/templates/ByteDance-Seed-OSS.jinja",
        tool_calls.SEED,
        _template(
            "\n<seed:tool_call>\n<function={{ f.name }}>\n"
            + _ITEMS.replace("ITEM", _SEED)
            + "</function>\n</seed:tool_call>"
        ),
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        "vllm 7a3bde4 examples/tool_chat_template_qwen3coder.jinja",
        tool_calls.QWEN3_CODER,
        _template(
            "\n<tool_call>\n<function={{ f.name }}>\n"
            + _ITEMS.replace("ITEM", _QWEN)
            + "</function>\n</tool_call>"
        ),
    ),
    (
        "functionary 3.1",
        "llama.cpp e884d3d models/templates/meetkai-functionary-medium-v3.1.jinja",
        tool_calls.FUNCTIONARY,
        _template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    ),
    (
        "GLM 4.5, 4.6",
        "llama.cpp afefa65 models/templates/GLM-4.6.jinja",
        tool_calls.GLM,
        _template("\n<tool_call>{{ f.name }}\n" + _ITEMS.replace("ITEM", _GLM) + "</tool_call>"),
    ),
    (
        "GLM 4.7",
        "zai-org/GLM-4.7 chat_template.jinja",
        tool_calls.GLM,
        _template(
            "<tool_call>{{ f.name }}"
            + _ITEMS.replace("ITEM", _GLM.replace("\n", ""))
            + "</tool_call>"
        ),
    ),
    (
        "MiniMax M2",
        "llama.cpp a21f05a models/templates/unsloth-MiniMax-M2.jinja",
        tool_calls.MINIMAX,
        _template(
            '<invoke name="{{ f.name }}">\n' + _ITEMS.replace("ITEM", _MINIMAX) + "</invoke>\n",
            before="{{ m.content }}\n<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
    ),
    (
        "DeepSeek V3, R1",
        "llama.cpp 20bdc4f models/templates/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
        tool_calls.DEEPSEEK_V3,
        _template(
            _joined(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
                "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
                "\n",
            ),
            before="{{ m.content }}<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ),
    (
        "DeepSeek V3.1",
        "llama.cpp 0374c5b models/templates/deepseek-ai-DeepSeek-V3.1.jinja",
        tool_calls.DEEPSEEK_V31,
        _template(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
            "<｜tool▁call▁end｜>",
            before="{{ m.content }}<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ),
    (
        "DeepSeek V3.2",
        "llama.cpp 7086532 models/templates/DeepSeek-V3.2.jinja",
        tool_calls.DEEPSEEK_V32,
        _marked("DSML", "function_calls", before="{{ m.content }}\n\n", empty="\n"),
    ),
    (
        "GigaChat 3.5",
        "llama.cpp 44cfbeb models/templates/GigaChat3.5.jinja",
        tool_calls.GIGACHAT35,
        _marked(
            "GCML",
            "tool_calls",
            before="{{ m.content }}{% if m.content %}\n\n{% endif %}",
            empty="",
        ),
    ),
    (
        "GigaChat 3",
        "llama.cpp 6f9ffbd models/templates/GigaChat3-10B-A1.8B.jinja",
        tool_calls.GIGACHAT,
        _template(
            "{% if loop.first %}<|message_sep|>\n\nfunction call<|role_sep|>\n"
            + _JSON
            + "{% endif %}"
        ),
    ),
    (
        "Apertus",
        "vllm 0ef5399 examples/tool_chat_template_apertus.jinja",
        tool_calls.APERTUS,
        _template(
            _joined('{"{{ f.name }}": {{ f.arguments | tojson }}}', ", "),
            before="{{ m.content }}<|tools_prefix|>[",
            after="]<|tools_suffix|>",
        ),
    ),
    (
        "Apriel 1.5, 1.6",
        "llama.cpp 20bdc4f models/templates/Apriel-1.6-15b-Thinker-fixed.jinja",
        tool_calls.TOOL_CALLS,
        _template(
            _joined(_JSON[:-1] + ', "id": "{{ c.id }}"}', ", "),
            before="{{ m.content }}\n<tool_calls>[",
            after="]</tool_calls>",
        ),
    ),
    (
        "Kimi K2",
        "llama.cpp 0c3c896 models/templates/moonshotai-Kimi-K2-Thinking.jinja",
        tool_calls.KIMI,
        _template(
            "<|tool_call_begin|>{{ c.id }}"
            "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
            before="{{ m.content }}<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        ),
    ),
    (
        "gpt-oss, as its template writes them",
        "openai-harmony 0.0.8 src/encoding.rs",
        tool_calls.HARMONY,
        _template(
            "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
            "{{ f.arguments | tojson }}<|call|>"
        ),
    ),
    (
        "gpt-oss, as the model writes them",
        "openai-harmony 0.0.8 docs/format.md",
        tool_calls.HARMONY,
        _template(
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
            "{{ f.arguments | tojson }}<|call|>"
        ),
    ),
    (
        "FunctionGemma",
        "google/functiongemma-270m-it chat_template.jinja",
        tool_calls.FUNCTIONGEMMA,
        _gemma("<escape>", "<start_function_call>", "<end_function_call>"),
    ),
    (
        "Gemma 4",
        "llama.cpp 75f1ba7 models/templates/gemma4.jinja",
        tool_calls.GEMMA4,
        _gemma('<|"|>', "<|tool_call>", "<tool_call|>"),
    ),
]
