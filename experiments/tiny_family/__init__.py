"""How the bundled tiny family was made from text: see README.md."""
