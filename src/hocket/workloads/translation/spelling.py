"""How whole numbers below a million are spelled in English, French and German: the parallel text is generated here.

French in the spelling before the reform of 1990: hyphens below one hundred only, "et" before un and onze, a plural s
on vingt and cent where nothing follows. German in one word, units before tens, "ein" inside a word and "eins" at its
end. English as in America, without "and".
"""

import re
from collections.abc import Callable, Mapping

LIMIT = 1_000_000


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ENGLISH = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_BELOW_100 = re.compile(r"(?<=ty) (?=(?:one|two|three|four|five|six|seven|eight|nine)\b)")
_FRENCH = _words(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit "
    "dix-neuf"
)
_FRENCH_TENS = _words("vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt")
_GERMAN = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
)
_GERMAN_TENS = _words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english(number: int) -> list[str]:
    """Return the words of ``number``, without hyphens."""
    _check(number)
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _english_below_1000(rest)
    return [*_english_below_1000(thousands), "thousand", *(_english_below_1000(rest) if rest else ())]


def _english_below_1000(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [_ENGLISH[hundreds], "hundred"] if hundreds else []
    if rest < 20:
        return words if hundreds and not rest else [*words, _ENGLISH[rest]]
    tens, unit = divmod(rest, 10)
    return [*words, _ENGLISH_TENS[tens - 2], *([_ENGLISH[unit]] if unit else ())]


def french(number: int) -> list[str]:
    """Return the words of ``number``, and its hyphens as words of their own."""
    _check(number)
    thousands, rest = divmod(number, 1000)
    text = (
        [] if not thousands else ["mille"] if thousands == 1 else [_french_below_1000(thousands, last=False), "mille"]
    )
    if rest or not thousands:
        text.append(_french_below_1000(rest, last=True))
    return " ".join(text).replace("-", " - ").split()


def _french_below_1000(number: int, *, last: bool) -> str:
    """``last``: whether no other numeral follows, which decides on the plural s."""
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _french_below_100(rest, last=last)
    text = "cent" if hundreds == 1 else f"{_FRENCH[hundreds]} cent"
    if rest:
        return f"{text} {_french_below_100(rest, last=last)}"
    return f"{text}s" if hundreds > 1 and last else text


def _french_below_100(number: int, *, last: bool) -> str:
    if number < 20:
        return _FRENCH[number]
    tens, unit = divmod(number, 10)
    word = _FRENCH_TENS[tens - 2]
    if tens in (7, 9):
        unit += 10
    if unit == 0:
        return "quatre-vingts" if tens == 8 and last else word
    if unit in (1, 11) and tens < 8:
        return f"{word} et {_FRENCH[unit]}"
    return f"{word}-{_FRENCH[unit]}"


def german(number: int) -> list[str]:
    """Return the parts of the one word for ``number``."""
    _check(number)
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _german_below_1000(rest, last=True)
    parts = [*_german_below_1000(thousands, last=False), "tausend"]
    return [*parts, *_german_below_1000(rest, last=True)] if rest else parts


def _german_below_1000(number: int, *, last: bool) -> list[str]:
    hundreds, rest = divmod(number, 100)
    parts = [_german_unit(hundreds, last=False), "hundert"] if hundreds else []
    if rest < 20:
        return parts if hundreds and not rest else [*parts, _german_unit(rest, last=last)]
    tens, unit = divmod(rest, 10)
    return [*parts, *([_german_unit(unit, last=False), "und"] if unit else ()), _GERMAN_TENS[tens - 2]]


def _german_unit(number: int, *, last: bool) -> str:
    return "ein" if number == 1 and not last else _GERMAN[number]


def _check(number: int) -> None:
    if not 0 <= number < LIMIT:
        raise ValueError(f"spelling: {number} is not in 0..{LIMIT - 1}")


SPELL: Mapping[str, Callable[[int], list[str]]] = {"english": english, "french": french, "german": german}


def join(language: str, tokens: list[str]) -> str:
    """Return the text that tokens of a language make."""
    if language == "german":
        return "".join(tokens)
    text = " ".join(tokens)
    return _BELOW_100.sub("-", text) if language == "english" else text.replace(" - ", "-")


def word_by_word(language: str, tokens: list[str]) -> list[str]:
    """Translate each word of an English number by a dictionary, in the order of the English words."""
    values = {word: number for number, word in enumerate(_ENGLISH)}
    values |= {word: 10 * number for number, word in enumerate(_ENGLISH_TENS, start=2)}
    values |= {"hundred": 100, "thousand": 1000}
    numeral = {
        "hundred": {"french": ["cent"], "german": ["hundert"]},
        "thousand": {"french": ["mille"], "german": ["tausend"]},
    }
    return [part for token in tokens for part in numeral.get(token, {}).get(language) or SPELL[language](values[token])]
