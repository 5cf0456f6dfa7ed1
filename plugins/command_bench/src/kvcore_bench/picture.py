"""What the pictures of commands have in common, as SVG. They follow the viewer's light or dark setting."""

_STYLE = """
  svg { color: #24292f; font: 13px system-ui, sans-serif; }
  text { fill: currentColor; }
  .paper { fill: #fff; }
  @media (prefers-color-scheme: dark) { svg { color: #d8dee6; } .paper { fill: #15191f; } }
  .faint { fill-opacity: .65; }
  .grid { stroke: currentColor; stroke-opacity: .15; }
  .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


def opening(width: int, height: int, style: str) -> list[str]:
    """The document's beginning: its size, its style with the picture's own, its paper."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<style>{_STYLE}{style}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
