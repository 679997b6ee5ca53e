"""Each module has FIGURES: a name to select it by, and what measures it with a bench.Bench."""
