"""The page for llama.cpp's maintainers says what the patches and the figures of the last run say."""

from __future__ import annotations

from upstream.page import PAGE, updated


def test_the_tables_of_the_page_are_the_generated_ones() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert updated(text) == text, "python -m upstream.page"


def test_the_page_says_what_it_is_at_its_head() -> None:
    head = PAGE.read_text(encoding="utf-8")[:700]
    assert "not a text to paste" in head and "person" in head
