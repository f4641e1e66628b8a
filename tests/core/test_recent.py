"""A cache that is bounded in bytes, whatever is put into it."""

from __future__ import annotations

from watersmeet.core.recent import Recent


def test_what_was_used_last_is_kept_as_far_as_there_is_room() -> None:
    recent, made = Recent[str](3 * 2000), list[str]()

    def get(key: str, size: int = 900) -> str:
        def make() -> str:
            made.append(key)
            return key * size

        return recent.get(key, make, len)

    for key in "abcabc":
        assert get(key) == key * 900
    assert made == [*"abc"]
    get("d")
    get("a")
    get("e")
    get("f")  # there is room for three
    made.clear()
    for key in "fea":
        get(key)
    assert made == []
    get("x", 10_000)
    for key in "fea":
        get(key)
    assert made == [*"xfea"], "and a value without room for it pushes out all others at most"
