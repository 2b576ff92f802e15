"""Texts that tokenizers are known to differ on, the same in every run."""

from __future__ import annotations

import random

SAMPLES = [
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "two\n\nlines\r\nand\ttabs\t\t.",
    "   indented:\n    - id: a1\n      depends_on: [a1, a2]\n",
    "I'll say it's 'fine', don't WE'RE You'Ve",
    "1234567890 3.14159 1,000,000 x2 v10.0.1",
    "def f(x):\n    return x**2 + 1  # comment\n\n\n",
    "naïve café Zürich ŁÓDŹ ĳ ﬁ Ǆ",
    "e\u0301 versus \u00e9; A\u030a versus \u212b",
    "Привет, мир! Γειά σου. שלום עולם مرحبا بالعالم",
    "漢字とひらがなとカタカナ、한국어 ภาษาไทย हिन्दी",
    "\U0001f600\U0001f9d1\u200d\U0001f680\U0001f1e9\U0001f1ea\u2764\ufe0f",
    "٣٤٥ ½ ² ⅷ ⑨ 〇 ௧",
    "zero\u200bwidth, nbsp\u00a0here, ideographic\u3000space, line\u2028sep",
    "<|im_start|>user\nHi<|im_end|>\n<tool_call></tool_call><bos><start_of_turn>",
    "<b>bold</b> &amp; <table><tr><td>x</td></tr></table>",
    "!!! ??? ... --- === *** ((nested [brackets] {here}))",
    "a" * 70,
    "\ufffd\ufeff\u2060 end",
]


def samples(count: int, seed: int = 0) -> list[str]:
    """`SAMPLES`, then random mixtures of their words with characters of many scripts, of `count` in all."""
    rng = random.Random(f"texts-{seed}")
    words = [w for text in SAMPLES for w in text.split(" ") if w]
    blocks = [(0x20, 0x7F), (0xA1, 0x250), (0x370, 0x530), (0x5D0, 0x6F0), (0x900, 0xA00), (0x3040, 0x3100)]
    blocks += [(0x4E00, 0x5000), (0xAC00, 0xAD00), (0x1F300, 0x1F700), (0x2000, 0x2200)]
    out = list(SAMPLES)
    while len(out) < count:
        parts = []
        for _ in range(rng.randrange(1, 12)):
            low, high = rng.choice(blocks)
            stray = "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 5)))
            parts.append(rng.choice([rng.choice(words), stray, str(rng.randrange(10**6)), "\n", "  "]))
        out.append(rng.choice(["", " ", "\n", "\t"]).join(parts))
    return out[:count]
