"""Detection of GBNF, and refusal of grammars without a finite text."""

import json

import pytest

from app.grammars.compiling import Compiler
from app.grammars.frames import GrammarKind, GrammarProblem, GrammarText
from app.grammars.lark import UnknownSyntax, is_gbnf, rules_of, tokens_of
from app.grammars.process import bytes_tokenizer

SQL_IN_GBNF = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number   # a comment with start: in it
number ::= "1 " | "2 "
"""
SQL_IN_LARK = """
?start: select_statement
?select_statement: "SELECT " column_list " FROM " table_name
?column_list: column_name ("," column_name)*
?table_name: identifier
?column_name: identifier
?identifier: /[a-zA-Z_][a-zA-Z0-9_]*/
"""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(bytes_tokenizer(), bytes_tokenizer())


def lets_through(compiler: Compiler, source: GrammarText, text: str) -> bool:
    matcher = compiler.compile(source)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_in_gbnf"),
    [
        (SQL_IN_GBNF, True),
        (SQL_IN_LARK, False),
        ('root::="a"', True),
        ('start: "a ::= b"', False),
        ("start: /a ::= b/", False),
        ("// a ::= b\nstart: A\nA: /x/", False),
        ("# root ::= b\nstart: /x/", False),
        ('root ::= [^"\\]] "::="', True),
        ('start: a::_ \na::_: "x"', False),
        ("", False),
    ],
)
def test_gbnf_is_detected(text: str, is_in_gbnf: bool) -> None:
    assert is_gbnf(text) is is_in_gbnf


def test_sql_grammar_compiles_in_both_dialects(compiler: Compiler) -> None:
    assert lets_through(compiler, GrammarText("gbnf", SQL_IN_GBNF), "SELECT col_1  from table_2  where col_2 = 1 ")
    assert lets_through(compiler, GrammarText("lark", SQL_IN_LARK), "SELECT a,b FROM c")


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("gbnf", "root ::= a\na ::= b\nb ::= a", "rule 'a' requires itself"),
        ("gbnf", 'root ::= "x" root', "rule 'start' requires itself"),
        ("lark", 'start: "a" dead | dead\ndead: "b" dead', "rule 'dead' requires itself"),
        ("lark", "start: (dead | dead)+\n%ignore / /\ndead: start ~ 2", "requires itself"),
        ("lark", 'start: %lark {\nstart: a\na: "x" a\n}', "requires itself"),
        ("lark", 'start: "x" A\nA: /[a-z]/ & /[0-9]/', "nothing matches A"),
        ("lark", "start: A\nA: B+\nB: /x/ & ~/x/", "nothing matches B"),
        ("lark", r'start: "x" /[^\s\S]/', r"nothing matches"),
        ("regex", r"[^\s\S]", "No text matches"),
        ("regex", r"a[^\w\W]b", "No text matches"),
    ],
)
def test_grammar_without_finite_text_is_refused(compiler: Compiler, kind: GrammarKind, text: str, problem: str) -> None:
    with pytest.raises(GrammarProblem, match=problem):
        compiler.compile(GrammarText(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("gbnf", 'root ::= "x" root | "y"', "xxy"),
        ("gbnf", 'root ::= a? "y"\na ::= "x" a', "y"),
        ("lark", 'start: "x" A | "y"\nA: /[a-z]/ & /[0-9]/', "y"),
        ("lark", 'start: [dead] "y"\ndead: dead', "y"),
        ("lark", 'start: dead* "y" | dead~0..3 "y" | dead{0,2} "y"\ndead: dead', "y"),
        ("lark", 'start: "(" start ")" | "y"\n%ignore /[ ]+/', "((y))"),
        ("lark", 'start: WORD -> word\nWORD: "a".."z"+', "abc"),
        ("lark", 'start[capture]: text " "\ntext[lazy, max_tokens=9]: /[a-z]+x/', "abx "),
        ("lark", '%import common.INT\nstart: INT\n     | "y"', "42"),
        ("lark", 'start: %json {"const": [1]} "!"', "[1]!"),
        ("lark", 'start: "a"i /b/i ("c" | "d"){2}', "ABcd"),
        ("lark", 'start: NUMBER | "[" start "]"\nNUMBER: /[0-9]{1,3}/', "[[12]]"),
        ("lark", 'start: %gbnf "root ::= \\"g\\" [0-9]+" "!"', "g12!"),
    ],
)
def test_grammar_with_finite_text_is_compiled(compiler: Compiler, kind: GrammarKind, text: str, said: str) -> None:
    assert lets_through(compiler, GrammarText(kind, text), said)
    if kind == "lark":
        rules_of(text, tokens_of(text))  # raises if the grammar is not parsed completely


def test_schemas_within_a_grammar_are_enforced(compiler: Compiler) -> None:
    closed = GrammarText("lark", 'start: "x" %json {"properties": {"a": {"const": 1}}} "y"')
    assert lets_through(compiler, closed, 'x{"a":1}y')
    assert not lets_through(compiler, closed, 'x{"b":1}y')
    unique = {"items": {"type": "array", "uniqueItems": True}}
    with pytest.raises(GrammarProblem, match="uniqueItems") as refused:
        compiler.compile(GrammarText("lark", f"start: %json {json.dumps(unique)}"))
    assert refused.value.path == ".items.uniqueItems"
    lenient = {**unique, "x-guidance": {"lenient": True, "whitespace_flexible": False}}
    assert lets_through(compiler, GrammarText("lark", f"start: %json {json.dumps(lenient)}"), "[[1,1]]")


def test_unknown_syntax_is_left_to_the_library() -> None:
    with pytest.raises(UnknownSyntax):
        rules_of(text := "start: a{b}\na{x}: x", tokens_of(text))
