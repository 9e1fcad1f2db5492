"""Tables of commands on terminals of several widths."""

from app.commands.output import fitted_lines

ROWS = [
    ("NAME", "SIZE", "PATH"),
    ("qwen3:4b", "2.5 GB", "/home/me/models/qwen3-4b-instruct.gguf"),
    ("a-repository-with-a-long-name:q4_k_m", 12, "/home/me/models/other.gguf"),
]


def test_a_table_outside_a_terminal_is_whole() -> None:
    assert fitted_lines(ROWS, None) == [
        "NAME                                  SIZE    PATH",
        "qwen3:4b                              2.5 GB  /home/me/models/qwen3-4b-instruct.gguf",
        "a-repository-with-a-long-name:q4_k_m  12      /home/me/models/other.gguf",
    ]
    assert fitted_lines(ROWS, 84) == fitted_lines(ROWS, None)


def test_paths_have_their_own_lines_in_a_narrow_terminal() -> None:
    assert fitted_lines(ROWS, 60) == [
        "NAME                                  SIZE",
        "  PATH",
        "qwen3:4b                              2.5 GB",
        "  /home/me/models/qwen3-4b-instruct.gguf",
        "a-repository-with-a-long-name:q4_k_m  12",
        "  /home/me/models/other.gguf",
    ]


def test_the_widest_columns_are_shortened_in_the_middle() -> None:
    lines = fitted_lines(ROWS, 30)
    assert lines[4] == "a-reposito…name:q4_k_m  12"
    assert lines[2] == "qwen3:4b                2.5 GB"


def test_no_terminal_is_too_narrow_for_a_table() -> None:
    assert fitted_lines(ROWS, 1)[4] == "a…m  12"
