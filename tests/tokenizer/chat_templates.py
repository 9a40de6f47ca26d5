"""Chat templates in the manner of the families people use, and conversations for them."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] " + message.tool_calls[0].function.name + eos_token }}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

MARKED = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

SAID = [
    {"role": "system", "content": "  Be kind & <brief>.\n"},
    {"role": "user", "content": '¿Qué tal? 你好 "quoted"\n\n'},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine, thanks."},
    {"role": "user", "content": "And now?"},
]
CALLED = [
    {"role": "user", "content": "The weather in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"at": "Bern ☀"}}}
        ],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "Clear."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say the weather <now>.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]

RENAMED = """\
{{ bos_token }}
{%- set names = {'assistant': 'model', 'tool': 'user'} %}
{%- for message in messages %}
    {%- if message.role != 'system' %}
<turn>{{ names.get(message.role, message.role) }}
        {%- if message.content is string %}
 {{ message.content | trim }}
        {%- else %}
            {%- for part in message.content %}{{ part.text | trim if part.text }}{% endfor %}
        {%- endif %}</turn>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<turn>model {% endif %}
"""
# Each uses a few constructs of the language.
CONSTRUCTS = [
    "{%- macro item(x, n=2) -%}[{{ x|upper }}{{ n }}{{ caller() }}]{%- endmacro -%}"
    "{% for m in messages %}{% call item(m.role) %}!{% endcall %}{{ loop.cycle('a', 'b') }}"
    "{{ loop.previtem.role if loop.previtem is defined }}{% endfor %}",
    "{% set t %}{% for m in messages if m.role != 'system' %}"
    "{{ m.content | replace('\n', '') | indent(2) }}|{% endfor %}{% endset %}{{ t }}{{ t|length }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ messages | map(attribute='role') | unique | list }}{{ (messages|last).role }}",
    "{{ {'b': [1, 2.5, none, true], 'a': 'ä<'} | tojson(sort_keys=true) }}{{ zz | default('y') }}",
    "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }};{% endfor %}{{ 'abc'[::-1] }}"
    "{{ '%s-%d' % ('a', 3) }}{{ '{:>5}'.format(7) }}{{ 'a,b'.split(',') }}{{ 1.0 }}{{ 'a' ~ 1 }}",
    "  {% if true %}\n  x\n  {% endif %}\n\t{% for m in messages %}\n    {{ m.role }}   \n"
    "{% endfor %}\ntail\n",
    "{# note #}\n{% raw %}{{ x }}{% endraw %}{% filter upper %}abc{% endfilter %}"
    "{% with a=3 %}{{ a }}{% endwith %}{{ range(3)|list }}",
    "{% set turn = cycler('a', 'b') %}{% for m in messages %}{{ turn.next() }}{% endfor %}"
    "{% for group in messages|groupby('role') %}{{ group.grouper }}{{ group.list|length }}"
    "{% endfor %}{{ ('<a>'|e).upper() }}{{ range(5).stop }}{{ true.real }}{{ 'ä'.encode().hex() }}",
]
