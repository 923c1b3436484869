"""Answers that the chat page is tried with: what Markdown can say, nested and hostile."""

MARKDOWN = """Three *points*, the `last` one in code:

1. one
2. two

| name | size |
|:--|--:|
| a | 10 |

```python
def f():
    return "<b>"
```

See [this](https://example.org/a).
"""
NESTED = """- [ ] open
- [x] done

  more
- a
  - b
    1. c

       ```py
       x = 1
       ```
    2. d

  > quote
  > | a | b |
  > |---|---|
  > | 1 | 2 |

text [a][1] and ![i](https://example.org/i.png) <b>html</b>

<div>
block
</div>

| h | i |
|:-:|--:|
| `c` | **d** |
| e

3. three
4. <p>four</p>

Head
====

> a
> > b

[1]: https://example.org
"""
HOSTILE = """<script>window.broken = 1</script><img src=x onerror="window.broken = 2">
[a](javascript:window.broken=3) [b](JaVaScRiPt&colon;window.broken=4) ![c](https://example.org/spy.png)

<a href="javascript:window.broken=5" onclick="window.broken=6">d</a> <svg onload="window.broken=7"><style>*{}</style>
<iframe src="https://example.org/"></iframe><div style="background:url(https://example.org/)" class="message">

```"><img/src=x/onerror=window.broken=8>
x
```
"""
