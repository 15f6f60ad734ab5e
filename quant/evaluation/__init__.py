"""How good a checkpoint is, alone or against another: metrics, task accuracy, charts."""
