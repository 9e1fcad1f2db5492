"""The formats in which models write replies, taken from the chat templates that they were trained with.

The first format that matches a reply is used, so formats with more specific markup come first.
"""

from app.generation.tool_parsers.reply_format import CallSyntax, MessageSyntax, ThinkingSyntax

_HARMONY_HEADS = ("<|start|>assistant<|channel|>commentary", "<|channel|>commentary", "<|channel|>analysis")

THINKING = (
    ThinkingSyntax(  # gpt-oss
        ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        ("<|end|>",),
    ),
    ThinkingSyntax(("<|channel>thought\n", "<|channel>"), ("<channel|>",)),  # Gemma 4
    ThinkingSyntax(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),  # Kimi K3
    ThinkingSyntax(("<|think|>", "<|begin|>assistant<|think|>"), ("<|end|>",)),  # Solar
    ThinkingSyntax(("<|start|>assistant to=self<|message|>",), ("<|eom|>",)),  # Muse
    ThinkingSyntax(("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Command
    ThinkingSyntax(("<seed:think>",), ("</seed:think>",)),
    ThinkingSyntax(("<mm:think>",), ("</mm:think>",)),  # MiniMax M3
    ThinkingSyntax(("<think:opensource>",), ("</think:opensource>",)),  # Hunyuan
    ThinkingSyntax(("[THINK]",), ("[/THINK]",)),  # Mistral
    ThinkingSyntax(("<|inner_prefix|>",), ("<|inner_suffix|>",)),  # Apertus
    ThinkingSyntax(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),  # Apriel
    ThinkingSyntax(("<think>",), ("</think>",)),
)

MESSAGES = (
    MessageSyntax(  # gpt-oss
        "<|channel|>analysis",
        ("<|start|>assistant<|channel|>{any}<|message|>", "<|channel|>{any}<|message|>", "<|return|>", "<|call|>"),
        openings=("<|start|>assistant",),
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    MessageSyntax(  # Kimi K3
        "<|open|>response",
        (
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>message{any}<|sep|>",
            "<|end_of_msg|>",
        ),
        answer="<|open|>response<|sep|>",
    ),
    MessageSyntax(  # Solar
        "<|tool_call:begin|>",
        ("<|begin|>assistant<|content|>", "<|begin|>assistant", "<|content|>"),
        openings=("<|begin|>assistant",),
        answer="<|begin|>assistant<|content|>",
    ),
    MessageSyntax(  # Muse
        "assistant to=self",
        ("<|start|>assistant to={name}<|message|>", "<|start|>assistant<|message|>", "<|eom|>"),
        openings=("<|start|>assistant",),
        answer="<|start|>assistant<|message|>",
    ),
    MessageSyntax(">>>${recipient}", (">>>all\n",), openings=(">>>",), answer=">>>all\n"),  # Functionary 3.2
    MessageSyntax("function call<|role_sep|>", ("<|message_sep|>",)),  # GigaChat 3
    MessageSyntax("[END FINAL RESPONSE]", ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")),  # Apriel
)

CALLS = (
    CallSyntax(
        "seed",
        ("<function={name}>\n{parameters}</function>",),
        parameters=("<parameter={key}>{value}</parameter>\n",),
        around=("<seed:tool_call>\n", "\n</seed:tool_call>"),
    ),
    CallSyntax(
        "qwen-coder",
        ("<function={name}>\n{parameters}</function>",),
        parameters=("<parameter={key}>\n{value}\n</parameter>\n",),
        around=("<tool_call>\n", "\n</tool_call>"),
    ),
    CallSyntax("functionary-tags", ("<function={name}>{json}</function>",)),
    CallSyntax(
        "minicpm",
        ('<function name="{name}">{parameters}</function>',),
        parameters=('<param name="{key}"><![CDATA[{value}]]></param>', '<param name="{key}">{value}</param>'),
    ),
    CallSyntax(
        "glm",
        ("<tool_call>{name}\n{parameters}</tool_call>",),
        parameters=("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",),
    ),
    CallSyntax(
        "hunyuan",
        ("<tool_call:opensource>{name}<tool_sep:opensource>\n{parameters}</tool_call:opensource>",),
        parameters=(
            "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n",
        ),
        around=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
    ),
    CallSyntax(
        "minimax",
        ('<invoke name="{name}">\n{parameters}</invoke>',),
        parameters=('<parameter name="{key}">{value}</parameter>\n',),
        around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    CallSyntax(
        "minimax-3",
        (']<]minimax[>[<invoke name="{name}">{parameters}]<]minimax[>[</invoke>',),
        parameters=("]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>",),
        around=("]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"),
    ),
    CallSyntax(
        "deepseek-tags",
        ('<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',),
        parameters=('<｜DSML｜parameter name="{key}" string="{type}">{value}</｜DSML｜parameter>\n',),
        around=(
            "<｜DSML｜function_calls>\n",
            "\n</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
        ),
        text_words=("true", "false"),
    ),
    CallSyntax(
        "muse",
        ('<atem:invoke name="{name}">\n{parameters}</atem:invoke>',),
        parameters=('<atem:parameter name="{key}">{value}</atem:parameter>\n',),
        around=("<atem:function_calls>\n", "\n</atem:function_calls>"),
    ),
    CallSyntax(
        "kimi-3",
        ('<|open|>call tool="{name}"{any}<|sep|>{parameters}<|close|>call<|sep|>',),
        parameters=('<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',),
        around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    CallSyntax(
        "kimi",
        ("<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{json}<|tool_call_end|>",),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    CallSyntax(
        "deepseek",
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
        ),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallSyntax(
        "solar",
        ("<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{json}<|tool_call:end|>",),
        around=("<|begin|>assistant<|tool_calls|>", "<|calls|>", "<|tool_calls|>"),
    ),
    CallSyntax("gemma-4", ("<|tool_call>call:{name}{json}<tool_call|>",)),
    CallSyntax("function-gemma", ("<start_function_call>call:{name}{json}<end_function_call>",)),
    CallSyntax(
        "harmony",
        (
            "<|start|>assistant to=functions.{name}<|channel|>{any}<|message|>{json}<|call|>",
            *(f"{head} to=functions.{{name}}{{any}}<|message|>{{json}}<|call|>" for head in _HARMONY_HEADS),
        ),
        any="commentary json",
    ),
    CallSyntax(
        "mistral",
        (
            "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{json}",
            "[TOOL_CALLS]{name}[ARGS]{json}",
            "[TOOL_CALLS]{objects}",
        ),
        listed=True,
    ),
    CallSyntax("apertus", ("<|tools_prefix|>{keyed}<|tools_suffix|>",), object='{"{name}": {arguments}}', listed=True),
    CallSyntax("lfm", ("<|tool_call_start|>{python}<|tool_call_end|>",), listed=True),
    CallSyntax(
        "command",
        ("<|START_ACTION|>{objects}<|END_ACTION|>",),
        object='{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}',
        listed=True,
    ),
    CallSyntax(
        "command-r",
        ("Action:\n```json\n{objects}\n```",),
        object='{"tool_name": "{name}", "parameters": {arguments}}',
        listed=True,
    ),
    CallSyntax("nemotron", ("<TOOLCALL>{objects}</TOOLCALL>",), listed=True),
    CallSyntax(
        "granite", ("<|tool_call|>{objects}<|/tool_call|>", "<|tool_call|>{objects}"), listed=True
    ),  # Granite and Phi 4 mini
    CallSyntax("gigachat", ("<|function_call|>{objects}",)),
    CallSyntax("gigachat-3", ("<|message_sep|>\n\nfunction call<|role_sep|>\n{objects}",)),
    CallSyntax("functools", ("functools{objects}",), listed=True),
    CallSyntax("tool-calls", ("<tool_calls>{objects}</tool_calls>",), listed=True),
    CallSyntax("hermes", ("<tool_call>\n{objects}\n</tool_call>",)),
    CallSyntax("functionary", (">>>{name}\n{json}",)),
    CallSyntax("tool-code", ("```tool_code\n{python}\n```",)),  # Gemma 3
    CallSyntax(
        "llama",
        ("<|python_tag|>{objects}", "<|python_tag|>{python}", "{objects}"),
        unmarked=True,
        object='{"name": "{name}", "parameters": {arguments}}',
    ),
)
