"""The bundled demo model: package data, and the tasks it was trained on."""
