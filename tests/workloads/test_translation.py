import pytest
import torch

from hocket.workloads.translation import spelling
from hocket.workloads.translation.data import HeldOut, Language, Pairs, held_out_numbers, is_held_out
from hocket.workloads.translation.model import BEGIN, END, PADDING, Transformer
from hocket.workloads.translation.settings import SIZES


@pytest.mark.parametrize(
    ("number", "english", "french", "german"),
    [
        (0, "zero", "zéro", "null"),
        (1, "one", "un", "eins"),
        (16, "sixteen", "seize", "sechzehn"),
        (21, "twenty-one", "vingt et un", "einundzwanzig"),
        (71, "seventy-one", "soixante et onze", "einundsiebzig"),
        (77, "seventy-seven", "soixante-dix-sept", "siebenundsiebzig"),
        (80, "eighty", "quatre-vingts", "achtzig"),
        (81, "eighty-one", "quatre-vingt-un", "einundachtzig"),
        (91, "ninety-one", "quatre-vingt-onze", "einundneunzig"),
        (100, "one hundred", "cent", "einhundert"),
        (101, "one hundred one", "cent un", "einhunderteins"),
        (300, "three hundred", "trois cents", "dreihundert"),
        (380, "three hundred eighty", "trois cent quatre-vingts", "dreihundertachtzig"),
        (1000, "one thousand", "mille", "eintausend"),
        (21_001, "twenty-one thousand one", "vingt et un mille un", "einundzwanzigtausendeins"),
        (80_000, "eighty thousand", "quatre-vingt mille", "achtzigtausend"),
        (
            101_200,
            "one hundred one thousand two hundred",
            "cent un mille deux cents",
            "einhunderteintausendzweihundert",
        ),
        (200_016, "two hundred thousand sixteen", "deux cent mille seize", "zweihunderttausendsechzehn"),
    ],
)
def test_numbers_are_spelled_by_the_rules_of_each_language(number: int, english: str, french: str, german: str) -> None:
    for language, text in (("english", english), ("french", french), ("german", german)):
        assert spelling.join(language, spelling.SPELL[language](number)) == text


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="1000000 is not in"):
        spelling.french(1_000_000)


@pytest.mark.parametrize("language", ["english", "french", "german"])
def test_no_two_numbers_are_spelled_alike(language: str) -> None:
    numbers = [*range(3000), *range(3000, spelling.LIMIT, 997)]
    assert len({spelling.join(language, spelling.SPELL[language](number)) for number in numbers}) == len(numbers)


@pytest.mark.parametrize("name", ["english", "french", "german"])
def test_every_number_fits_and_comes_back(name: str) -> None:
    language = Language(name)
    longest = 0
    for number in (*range(1000), *range(1000, spelling.LIMIT, 101)):
        words = spelling.SPELL[name](number)
        tokens = language.encode(words)
        assert len(tokens) == language.length
        assert language.decode(tokens) == words
        longest = max(longest, len(words) + 1)
    assert longest == language.length


def test_training_never_sees_what_is_held_out() -> None:
    pairs = Pairs(Language("english"), Language("french"), seed=3)
    seen = {pairs.number(index) for index in range(2000)}
    assert not any(is_held_out(number) for number in seen)
    assert {len(str(number)) for number in seen} == {1, 2, 3, 4, 5, 6}
    held_out = held_out_numbers(300)
    assert len(set(held_out)) == 300
    assert all(is_held_out(number) for number in held_out)


def test_epochs_differ_and_are_the_same_every_time() -> None:
    first, again = (Pairs(Language("english"), Language("german"), seed=1) for _ in range(2))
    numbers = [first.number(index) for index in range(50)]
    assert numbers == [again.number(index) for index in range(50)]
    first.set_epoch(1)
    assert numbers != [first.number(index) for index in range(50)]


def test_what_comes_next_is_what_is_written_one_later() -> None:
    _, so_far, expected = HeldOut(Language("english"), Language("french"), 1)[0]
    assert so_far[0] == BEGIN
    assert torch.equal(so_far[1:], expected[:-1])
    assert int((expected == END).sum()) == 1


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SIZES["tiny"], source_words=9, target_words=11, source_length=6, target_length=5)


def test_words_do_not_see_what_comes_after_them_and_nobody_sees_padding() -> None:
    model, source, target = transformer(), torch.tensor([[4, 5, END, PADDING]]), torch.tensor([[BEGIN, 6, 7]])
    scores = model(source, target)
    assert scores.shape == (1, 3, 11)
    later = model(source, torch.tensor([[BEGIN, 6, 8]]))
    torch.testing.assert_close(later[:, :2], scores[:, :2])
    assert not torch.allclose(later[:, 2], scores[:, 2])
    longer = model(torch.tensor([[4, 5, END, PADDING, PADDING]]), target)
    torch.testing.assert_close(longer, scores)


def test_translating_takes_the_most_likely_word_each_time() -> None:
    model, source = transformer(), torch.tensor([[4, 5, END], [3, END, PADDING]])
    written = model.translate(source, 4)
    so_far = torch.cat([torch.full((2, 1), BEGIN), written[:, :-1]], dim=1)
    assert torch.equal(model(source, so_far).argmax(dim=-1), written)
