"""Text in ONNX models: it is known when a model is compiled."""

from __future__ import annotations

import random
import re
import warnings

import numpy as np
import pytest

from rlx.errors import CorruptFileError, InputDTypeError, InputShapeError, Unsupported
from rlx.frontends.onnx import OnnxModel, call, regex
from rlx.frontends.onnx.importer import from_onnx
from rlx.frontends.onnx.regex import Pattern
from tests.onnx_models import parsed

WORDS = """agraph (string[n] words, float[4,2] table) => (float[n,2] y, string[k] low) {
  low = StringNormalizer <case_change_action = "LOWER"> (words)
  ids = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b", "c"], values_int64s = [0, 1, 2], default_int64 = 3> (low)
  y = Gather (table, ids)
}"""
TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)


def with_ml(text):
    proto = parsed(text)
    proto.opset_import.add(domain="ai.onnx.ml", version=4)
    return proto


def test_a_model_is_compiled_for_the_contents_of_its_text():
    model = OnnxModel(with_ml(WORDS))
    for words in (["A", "zé", "c"], np.array(["A", "zé", "c"]), np.array([b"A", "zé".encode(), b"c"])):
        y, low = model(words, TABLE)
        np.testing.assert_array_equal(y, TABLE[[0, 3, 2]])
        assert low.tolist() == ["a", "zé", "c"] and low.dtype == object
    y, low = model(["b"], TABLE)
    low[0] = "changed"  # the caller's own
    assert model(["b"], TABLE)[1].tolist() == ["b"]
    assert model.reasons == ["first call", "words is text[1] ['b'], was text[3] ['A', 'zé', 'c']"]
    assert model.inputs[0] == ("words", None, "text")


def test_text_that_is_none_or_of_other_dims_is_refused():
    model = OnnxModel(with_ml(WORDS))
    with pytest.raises(InputDTypeError, match="input 'words' is text, an array of str, got an array of int64"):
        model([1, 2], TABLE)
    with pytest.raises(InputShapeError, match=r"input 'words' is text\['n'\], got dims \[1, 1\]"):
        model([["a"]], TABLE)
    with pytest.raises(Unsupported, match=r"input 'words' is text, .*give values=\{'words'"):
        from_onnx(with_ml(WORDS))
    with pytest.raises(Unsupported, match="an output of text, which a graph cannot have: use rlx.load"):
        from_onnx(with_ml(WORDS), values={"words": ["a"]})
    with pytest.raises(Unsupported, match=r"input 'words': its contents \[1\] are no array of text"):
        from_onnx(with_ml(WORDS), values={"words": [1]})
    proto = with_ml(WORDS)
    proto.graph.initializer.add(name="w", data_type=8, dims=[2], string_data=[b"one"])
    with pytest.raises(CorruptFileError, match=r"of text has the dims \[2\], and 1 elements"):
        OnnxModel(proto)(["a"], TABLE)


def test_operators_that_move_and_compare_elements_take_text():
    text = """agraph (string[2,3] x, int64 at, bool c)
      => (string[a] row, bool[2,3] same, string[b] kinds, string[d] picked, float[2,3] f) {
      row = Gather (x, at)  t = Transpose (x)  shape = Constant <value = int64[2] {2, 3}> ()  r = Reshape (t, shape)
      same = Equal (x, r)  flat = Constant <value = int64[1] {-1}> ()  l = Reshape (x, flat)  kinds = Unique (l)
      picked = If (c) <then_branch = a () => (string[d] p) { p = Identity (kinds) },
                       else_branch = b () => (string[d] q) { q = Concat <axis = 0> (row, row) }>
      f = Cast <to = 1> (x)
    }"""
    x = np.array([["1", "2.5", "1"], ["-3e2", "nan", "2.5"]], object)
    row, same, kinds, picked, f = OnnxModel(parsed(text)).run([x, np.array(-1), np.array(False)])
    assert row.tolist() == x[1].tolist() and picked.tolist() == [*row, *row] and kinds.tolist() == sorted(set(x.reshape(-1)))
    np.testing.assert_array_equal(same, x == x.T.reshape(2, 3))
    np.testing.assert_array_equal(f, x.astype(np.float32))
    with pytest.raises(Unsupported, match="node 0 Neg: text is where numbers are needed"):
        OnnxModel(parsed("agraph (string[n] x) => (string[n] y) { y = Neg (x) }"))(["a"])
    for node in ("Equal (x, n)", "Concat <axis = 0> (x, n)", "Gather (n, x)"):
        with pytest.raises(Unsupported, match="text stands beside numbers, or where numbers are needed"):
            OnnxModel(parsed(f"agraph (string[k] x, int64[k] n) => (int64[m] y) {{ y = {node} }}"))(["a", "b"], np.array([0, 1]))
    with pytest.raises(Unsupported, match="the text is no number of int64"):
        OnnxModel(parsed("agraph (string[n] x) => (int64[n] y) { y = Cast <to = 7> (x) }"))(["a"])
    shown = OnnxModel(parsed("agraph (int64[n] x) => (string[n] y) { y = Cast <to = 8> (x) }"))(np.array([1 << 62, -5]))
    assert shown.tolist() == ["4611686018427387904", "-5"]


def test_text_n_grams_have_weights():
    text = """agraph (string[n,c] x) => (float[n,4] y) {
      y = TfIdfVectorizer <mode = "MODE", min_gram_length = 1, max_gram_length = 2, max_skip_count = 1, ngram_counts = [0, 2],
        ngram_indexes = [3, 0, 1, 2], pool_strings = ["a", "b", "a", "b", "b", "a"], weights = [0.5, 2.0, 3.0, 4.0]> (x)
    }"""
    x = [["a", "b", "a", "x"], ["b", "b", "b", "a"]]
    counts = np.array([[1, 1, 1, 2], [3, 0, 2, 1]], np.float32)  # b; (a, b); (b, a), also with one between; a
    weights = np.array([0.5, 2, 3, 4], np.float32)
    for mode, want in (("TF", counts), ("IDF", np.minimum(counts, 1) * weights), ("TFIDF", counts * weights)):
        np.testing.assert_array_equal(OnnxModel(parsed(text.replace("MODE", mode)))(x), want)
    with pytest.raises(Unsupported, match="elements would be computed"):
        OnnxModel(parsed(text.replace("MODE", "TF").replace("[3, 0, 1, 2]", "[3, 0, 1, 4611686018427387903]")))(x)
    for old, new in (("[3, 0, 1, 2]", "[3, 0, 1]"), ("[0, 2]", "[2, 0]"), ("[0, 2]", "[0, 4611686018427387903]")):
        with pytest.raises(Unsupported, match="ngram_counts and ngram_indexes do not fit the pool"):
            OnnxModel(parsed(text.replace("MODE", "TF").replace(old, new)))(x)


@pytest.mark.parametrize(
    "text,words,why",
    [
        ("agraph (string[n] x) => (string[n, n] y) <int64[2] a = {-1, 1}> { z = Reshape(x, a) y = StringConcat(x, z) }",
         ["a"] * 40, "1600 elements would be computed"),
        ("agraph (string[n] x) => (string[n] y) { z = StringConcat(x, x) y = StringConcat(z, z) }", ["a" * 300], "1200 elements"),
        ("agraph (string[n] x) => (string[m] y) <int64[1] a = {100000000}> { y = Tile(x, a) }",
         ["a"], r"dims \[100000000\] is too large"),
    ],
)  # fmt: skip
def test_texts_that_would_fill_the_memory_are_refused(text, words, why, monkeypatch):
    monkeypatch.setattr(call, "ELEMENTS", 1000)
    with pytest.raises(Unsupported, match=why):
        OnnxModel(parsed(text))(words)


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "1" * 40])
def test_text_of_numbers_that_the_type_lacks_is_refused(number):
    with pytest.raises(Unsupported, match="the text is no number of int64"):
        OnnxModel(parsed("agraph (string[n] x) => (int64[n] y) { y = Cast <to = 7> (x) }"))(["1", number])


# -- regular expressions -------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, depth: int = 0) -> str:
    """A pattern on which RE2 and Python agree."""
    atoms = ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"[\d_-]", "^", "$", r"\b", r"\B", "[a-c1]", "", "(?i:A)"]
    made = []
    for _ in range(rng.randrange(1, 4)):
        one = rng.choice(atoms)
        if depth < 3 and rng.random() < 0.4:
            one = f"({rng.choice(['', '?:'])}{drawn(rng, depth + 1)})"
        if one and one not in ("^", "$", r"\b", r"\B"):
            one += rng.choice(["", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "{,2}"])
        made.append(one)
    return "".join(made) + (f"|{drawn(rng, depth + 1)}" if depth < 2 and rng.random() < 0.3 else "")


def test_patterns_match_as_those_of_python():
    rng, matched = random.Random(5), 0
    for _ in range(400):
        text = drawn(rng).replace("{,2}", "")  # the two read it differently
        pattern, other = Pattern(text), re.compile(text.replace("$", r"\Z"), re.ASCII)
        for _ in range(12):
            word = "".join(rng.choice("ab.A1_- ") for _ in range(rng.randrange(5)))
            if not word and r"\B" in text:  # Python before 3.14 finds no \B in an empty text
                continue
            found = other.fullmatch(word) is not None
            assert pattern.matches(word) == found, (text, word)
            matched += found
    assert matched > 200


@pytest.mark.parametrize(
    "pattern,text,found",
    [
        (r"[[:alpha:]]+[[:space:]]\d{2,3}", "ab\t123", True),
        (r"[[:alpha:]]+", "aé", False),
        (r"(?i)ABC(?-i)?", "", None),
        (r"(?i)aBc", "AbC", True),
        (r"(?s)a.b", "a\nb", True),
        (r"a.b", "a\nb", False),
        (r"(?m)a$\n^b", "a\nb", True),
        (r"a$", "a\n", False),
        (r"a{,3}", "a{,3}", True),
        (r"\x{e9}\A", "é", False),
        (r"\Aé\z", "é", True),
        (r"[]a]+", "]a", True),
        (r"[a\]-]*", "]-a", True),
        (r"\s", "\v", False),
        (r"[\S]", "\v", True),
        (r"[^\s]", "\v", True),
        (r"x*", "", True),
        (r"(|a)+", "aaa", True),
        (r"()", "", True),
        (r"(?P<name>a)(?<other>b)", "ab", True),
        (r"(a)\1", "aa", None),
        (r"(?=a)a", "a", None),
        (r"a**", "a", None),
        (r"a{2,1}", "a", None),
        (r"a{1001}", "a", None),
        (r"(a", "a", None),
        (r"a)", "a", None),
        (r"[a", "a", None),
        ("\\", "a", None),
        (r"\pL", "a", None),
        (r"[z-a]", "a", None),
        (r"*a", "a", None),
        ("(" * 200 + ")" * 200, "", None),
        ("((a{1000}){1000}){1000}", "a", None),
        ("((){1000}){1000}", "", None),
        ("(?i)[[:^alpha:]]", "a", None),
        ("(?i)é", "É", True),
        ("(?i)[^é]", "É", False),
        ("(?i)k", "\u212a", True),  # the sign of kelvin
        (r"\w|\d|\s", "é", False),
        (r"\W\D\S", "éé\u00a0", True),
        (r"[^\W\d]", "1", False),
        (r"(?i)a(?-i)b", "AB", False),
        (r"(?is)A(?i-s:.)", "a\n", False),
        (r"(?)a", "a", None),
        (r"a{2}{3}", "aa{3}", None),
        (r"a+{2}", "a{2}", None),
        (r"a{2}{x", "aa{x", True),
        (r"[--0]", ".", True),
        (r"[+--]", ",", True),
        (r"[+--]", ".", False),
        (r"[a&&b]+", "&b", True),
        (r"[\s-z]", "A", False),  # a class, -, and z
        (r"[[:space:]-z]", "A", False),
        (r"[\w-z]+", "`", False),
        (r"[\w-z]+", "z-", True),
        (r"[!-\d]", "!", None),
        (r"[a-z-9]+", "-9b", True),
        (r"[a-", "a", None),
        (r"[^]a]", "]", False),
    ],
)
def test_patterns_are_those_of_re2(pattern, text, found):
    if found is None:
        with pytest.raises(ValueError, match="RE2|states|class of characters"):
            Pattern(pattern)
    else:
        with warnings.catch_warnings(action="error"):  # of Python's re, about classes that it may read in another way some day
            assert Pattern(pattern).matches(text) is found


def test_hostile_patterns_end_soon(monkeypatch):
    """Python's re takes 2**60 steps for each of these."""
    for pattern in ("(a+)+b", "(a|a)*b", "(a|aa)+b", "(a*)*b", "(.*){1,30}b", "((a?){30}){1,20}b"):
        assert not Pattern(pattern).matches("a" * 60)
        assert Pattern(pattern).matches("a" * 60 + "b")
    text = 'agraph (string[n] x) => (bool[n] y) { y = RegexFullMatch <pattern = "(a{0,90}){90}b"> (x) }'
    monkeypatch.setattr(regex, "STEPS", 10_000)
    with pytest.raises(Unsupported, match="takes more than 10000 steps"):
        OnnxModel(parsed(text))(["a" * 5000])
