"""Pre-tokenizers of byte-level BPE vocabularies: the patterns that split text into words, by `tokenizer.ggml.pre` name.

The patterns are those of each model's published tokenizer.json, in Oniguruma syntax. The names are those of llama.cpp
(src/llama-vocab.cpp). Other names are unsupported: a wrong pattern gives answers that are fluent but slightly worse, so
the pattern cannot be guessed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns whose matches become separate words.

    Each pattern is applied within the words of the patterns before it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is itself a token becomes that token
    add_bos: bool = False  # default for files without tokenizer.ggml.add_bos_token


def _any_of(*alternatives: str) -> str:
    return "|".join(alternatives)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_BLANKS = _any_of(r"\s+(?!\S)", r"\s+")
_LINES_AND_BLANKS = _any_of(r"\s*[\r\n]+", _BLANKS)
_CASED_WORD = _any_of(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_WORD_WITH_CONTRACTION = _any_of(*(f"{word}{_CONTRACTION}?" for word in _CASED_WORD.split("|")))

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _any_of(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES_AND_BLANKS)
_QWEN2 = _any_of(_CONTRACTION, _WORD, r"\p{N}", _SYMBOLS, _LINES_AND_BLANKS)
_QWEN35 = _any_of(
    _CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _LINES_AND_BLANKS,
)
_GPT4O = _any_of(_CASED_WORD_WITH_CONTRACTION, r"\p{N}{1,3}", _SYMBOLS_AND_SLASHES, _LINES_AND_BLANKS)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _any_of(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _LINES_AND_BLANKS,
    ),
)
_DEEPSEEK_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_TABLE: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    (("qwen35",), PreTokenizer((_QWEN35,))),
    (
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "gigachat", "mellum", "granite-docling"),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        ("tekken",),
        PreTokenizer(
            (_any_of(_CASED_WORD, r"\p{N}", _SYMBOLS_AND_SLASHES, _LINES_AND_BLANKS),),
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
    (
        ("deepseek-coder",),
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN_AND_HANGUL, r"\p{N}")),
    ),
    (
        ("deepseek-llm",),
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_HAN_AND_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    (
        ("seed-coder",),
        PreTokenizer((_any_of(_CONTRACTION, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES_AND_BLANKS),)),
    ),
    (
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (
                _any_of(
                    r"'(?i:[sdmt]|ll|ve|re)",
                    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                    r"\s*[\r\n]",
                    _BLANKS,
                ),
            )
        ),
    ),
    (
        ("minicpm5",),
        PreTokenizer(
            (r"\p{N}{1,3}", _any_of(_CONTRACTION, _WORD, r"\p{N}+", _SYMBOLS, _LINES_AND_BLANKS)),
            ignore_merges=True,
        ),
    ),
    (
        ("exaone-moe",),
        PreTokenizer(
            (
                _any_of(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    r"\s*[\r\n]",
                    _BLANKS,
                ),
            )
        ),
    ),
)

PRETOKENIZERS: dict[str, PreTokenizer] = {name: pre_tokenizer for names, pre_tokenizer in _TABLE for name in names}
