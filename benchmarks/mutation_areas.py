"""The areas of `benchmarks/mutation.py`: their sources, and the tests nearest to them."""

# The sources of each area, and the tests nearest to them: those of a file's own name first.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "core": (
        ("core/*.py",),
        (
            "tests/core",
            "tests/methods/test_rivals.py",
            "tests/test_broken_files.py",
            "tests/repairing/test_patched_weights.py",
        ),
    ),
    "methods": (
        ("methods/**/*.py",),
        ("tests/methods", "tests/docs/test_methods_page.py"),
    ),
    "evaluation": (
        ("evaluation.py", "timing.py", "experiments/comparison_rows.py"),
        (
            "tests/test_evaluation.py",
            "tests/experiments/test_comparison_figures.py",
            "tests/experiments/test_compare.py",
        ),
    ),
    "flops": (("flops.py",), ("tests/test_flops.py",)),
    "search": (
        ("search/*.py",),
        (
            "tests/search/test_searching.py",
            "tests/search/test_schedule.py",
            "tests/search/test_options.py",
            "tests/search/test_solve_variant.py",
            "tests/search/test_latency.py",
            "tests/search/test_presets.py",
            "tests/search/test_tune.py",
            "tests/search/test_solve.py",
            "tests/search/test_tune_hosts.py",
        ),
    ),
    "calibration": (
        ("calibration.py", "runtime/layerwise.py"),
        ("tests/test_calibration.py", "tests/test_calibrated_model.py", "tests/runtime/test_layerwise.py"),
    ),
}
# Files whose tests have other names: these come first, and the others of the area follow.
FIRST: dict[str, tuple[str, ...]] = {
    "core/weight_patch.py": ("tests/repairing/test_patched_weights.py",),
    "search/evaluator.py": ("tests/search/test_tune.py", "tests/search/test_tune_hosts.py"),
    "search/families.py": ("tests/search/test_schedule.py", "tests/search/test_presets.py"),
    "search/journal.py": ("tests/search/test_tune.py", "tests/search/test_latency.py"),
    "search/local_search.py": ("tests/search/test_searching.py", "tests/search/test_tune.py"),
    "search/scaling.py": ("tests/search/test_searching.py", "tests/search/test_presets.py"),
    "search/target.py": ("tests/search/test_options.py", "tests/search/test_solve.py"),
    "search/tuner.py": ("tests/search/test_searching.py", "tests/search/test_tune.py"),
    "search/variants.py": ("tests/search/test_solve_variant.py", "tests/search/test_solve.py"),
}
