"""Corpora: bounded size, and one corpus per cache salt."""

from engine.drafting.corpus import MAX_SALTS, Corpora, Corpus


def test_corpus_finds_the_latest_text_with_the_longest_match() -> None:
    corpus = Corpus()
    corpus.add([1, 2, 3, 4, 5, 6])
    corpus.add([9, 2, 3, 4, 7, 8])
    assert corpus.find([1, 2, 3, 4], 4) == (4, (5, 6))
    assert corpus.find([2, 3, 4], 4) == (3, (7, 8))
    assert corpus.find([3, 4, 1], 4) == (0, ())


def test_size_is_bounded_and_old_texts_are_dropped() -> None:
    corpus = Corpus(capacity=200)
    for number in range(1000):
        corpus.add([number, number + 1, number + 2, 7, 7])
        assert len(corpus) <= 200
    assert corpus.find([999, 1000, 1001], 3) == (3, (7, 7))
    assert corpus.find([0, 1, 2], 3) == (0, ())


def test_a_text_longer_than_the_corpus_is_cut_at_its_start() -> None:
    corpus = Corpus(capacity=200)
    corpus.add(list(range(1000)))
    assert len(corpus) <= 200
    assert corpus.find([950, 951, 952], 2) == (3, (953, 954))
    assert corpus.find([0, 1, 2], 2) == (0, ())


def test_salts_share_no_text() -> None:
    corpora = Corpora()
    corpora.add("a", [1, 2, 3, 4])
    assert corpora.of("") is None
    own = corpora.of("a")
    assert own is not None
    assert own.find([1, 2, 3], 1) == (3, (4,))
    corpora.forget("a")
    assert corpora.of("a") is None


def test_the_corpus_extended_longest_ago_is_dropped() -> None:
    corpora = Corpora()
    for number in range(MAX_SALTS):
        corpora.add(str(number), [1, 2, 3, 4])
    corpora.add("0", [1, 2, 3, 5])
    corpora.add("new", [1, 2, 3, 6])
    assert corpora.of("0") is not None
    assert corpora.of("1") is None
