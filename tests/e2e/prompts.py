"""32 varied prompts: prose, code, numbers, other scripts, one token, hundreds of tokens, shared beginnings."""

_STORY = (
    "The lighthouse keeper climbed the stairs every evening at seven, carrying a tin of oil and a book he never "
    "finished. The sea below was sometimes loud and sometimes so quiet that he could hear the gulls sleep. "
)
_CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    out = []
    while left and right:
'''
_SYSTEM = "<|im_start|>system\nYou are a patient teacher who answers in two sentences.<|im_end|>\n<|im_start|>user\n"

PROMPTS = [
    "Hello",
    "A",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n7 + 8 =",
    "Water boils at",
    "The three laws of thermodynamics are",
    _CODE,
    "import numpy as np\n\n# compute the mean of each row\n",
    "SELECT name, COUNT(*) FROM users",
    "<html>\n<body>\n<h1>",
    "Liebe Grüße aus München! Das Wetter ist",
    "La vie est belle parce que",
    "El perro y el gato",
    "日本の首都は",
    "Привет! Как",
    "🙂🙃 emoji test:",
    "Q: Why is the sky blue?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be, that is",
    _STORY,
    _STORY * 2 + "One night",
    _STORY * 4 + "In the end",
    _STORY * 6,
    _SYSTEM + "What is gravity?<|im_end|>\n<|im_start|>assistant\n",
    _SYSTEM + "Why do cats purr?<|im_end|>\n<|im_start|>assistant\n",
    _SYSTEM + "Explain recursion.<|im_end|>\n<|im_start|>assistant\n",
    "\n\n\n",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3,
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Ingredients:\n- 2 eggs\n- 100 g flour\n- 1 cup milk\n\nSteps:\n1.",
]
assert len(PROMPTS) == 32
