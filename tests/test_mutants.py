"""The mutants of a file: small mistakes, always the same ones, none in texts and error messages."""

import ast

from scripts import load_script

SOURCE = '''
def f(a: int = 2, b=0):
    """Text with 1 < 2."""
    if a < 3:
        raise ValueError(f"{a + 1}")
    return max(a, b) - g(a, dim=1)
'''


def test_mutants_of_a_small_function():
    found = load_script("mutants").mutants(SOURCE)
    assert [mutant.name for mutant in found] == [
        "f: 2 -> 3",
        "f: 0 -> 1",
        "f: if a < 3: raise ValueError(f'{a + 1}') -> if False: raise ValueError(f'{a + 1}')",
        "f: a < 3 -> a <= 3",
        "f: a < 3 -> a >= 3",
        "f: 3 -> 4",
        "f: return max(a, b) - g(a, dim=1) -> return None",
        "f: max(a, b) - g(a, dim=1) -> max(a, b) + g(a, dim=1)",
        "f: max -> min",
        "f: g(a, dim=1) -> g(a)",
        "f: 1 -> 2",
    ]
    assert len({mutant.text for mutant in found}) == len(found)
    for mutant in found:
        assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(SOURCE))
