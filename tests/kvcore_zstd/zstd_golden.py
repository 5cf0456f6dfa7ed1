"""Encoded bytes that every release must decode, whatever else changes. Never edit one; add another."""

import base64
import hashlib

from kvcore.api import ObjectLayout


def layout_of(nbytes: int, element_bytes: int) -> ObjectLayout:
    """A layout of one block of `nbytes`."""
    return ObjectLayout(
        blocks=1, ranks=1, layer_block_bytes=(nbytes,), dtype=f"test{element_bytes}", element_bytes=element_bytes
    )


def payload_of(width: int) -> bytes:
    """301 elements as KV has them (a narrow highest byte, noise below), then `width - 1` more bytes."""
    noise = b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(301 * width // 32 + 1))
    data = bytearray(noise[: 301 * width + width - 1])
    for i in range(301):
        data[i * width + width - 1] = 0x3C + (i * i) % 5 % 3
    return bytes(data)


ENCODED = {
    width: base64.b85decode(text)
    for width, text in {
        1: ("OIiUEEdc-k00000761SMD77#BU@ZV;001aFJv}`=0RSaXixv"),
        2: (
            "OIiXFTLJ(800000Edc-k761SMU+e#G*?4Vi!ouB=XV)iJYqJ0Roq+#8N2H=1z*4tc)LteQ;8}}Z0SC4p+GgylPC#PYU<Kae79y75"
            "WPT~1OLx>C9EeCAv?2YBi!rRf?-Jvbs$t~}nj(9<zK>+%=fHQ3%?lUTeHIdW{DJV6d1>T|M!NxJ=pt&LCE5riEJDp865lb(3igY("
            "+3?<E86Mv4|K%X(XKT8v@Am<<O58RC4-Pq8V1W;^9y8`0Pb;oRhEC%bqswgj1_%o7Yt-L=9M1RO*uw@3W<IQ`KcfVUDapKbVi9r)"
            "V&vuGg{a~aP%<G!lb?V)zQuK(=K7d2k8(>A`M3iL5`AHdvG$x>=#W_^u?B+H)u8l@MN}2d5J>2L)DaK=S&uupPFcdyqf;&#yeG1~"
            "7$~(b{a`HsWdHyuJUu-<JplkEP>U7{"
        ),
        4: (
            "OIidHw*&wH00000Edc-kEdc-kEdc-k761SMU;o){!rf;lYyX}9N20*D)F$AI0k+!gPGVr*7M5fwOVk`lwEc^$@8hcFntQ%v=XcE)"
            "eG>fedE`a`=xQYhEX@)z3X9p^8Q%XOXS(kJN;VHUU=JSVPp*dJqihBWYu_CA*al{-KLjbfVsc{Th2l^llYqW;=9rI5`2!MRv7G2x"
            "v4Yj~MHLX})DKxZPQs%uys{X@lpOlH7|Q-k^+@+G$EbLsZxY&_DUyNvc<Ychwet4BQ+`Q#C>7U*!s)3~P5G2;x6MRkT6lr7UySMG"
            "U=@4jXO|*#FsZ%7S=DDekyWQ-HEgtaq0Y?xVvKJut=b@1>!@|Ve3a}V;ta4DKyDK_#*~mP75XAxhGi;M#(!7JpYY_fn$!QYcGxh9"
            "M<vhTdI1j1AneFeY1>XI`-U`YTCFc0hjU&(o1Dcu69>M|&$oRGv?ASaWYIEJ+AVv~OCK)Bul8;;PXajmkpe9Ha%&i-8)DLw3Jqos"
            "`&fJ&N5|^}dqhI$MS|i|ugJ@cSm!P*1yNnTo?)LFyW8A`_*bd-fhQ#YEA|}P`6<_YV#AODeSUg7RqH3+&Lad2TbYiU=E(yA358XG"
            "{s6T-lj}}ir^=xwwI38M*-KyS{ge+7*k3ZuSO58LU0)^fb79(l*fr54&qSRIQ>Axply(2R=bWq&W`3dRLIyx?^3!g;8sQxg*U9Tl"
            "Z4<%_#S&ofu1lTq*6UXr&K?_u&AXN!^_*fV0fN9$g!4+x5B<s2f8~arjnh^BKokakwCFcDW2NyIke;+sP+`9AbG7Slcx=Lv*H^Oq"
            "fIp-iQd?dYSzQMoW~)Hk1>+*%exG+Ah#et}F~1U&VGJU>kK@3N3)dEUftG2CyJaGu+9X0D-^%v3@MIqC<>zaw_qE&v4qSn<GaV~O"
            "P8ZAj2=3H>&fmieKB=RO$#oG4<l?9kGDV*|#h&^yauT=-eT(*6kR}G!po~<_NPZFjkGWaVQyM3|3eoW=K2_&OO!qj}xOEsa;UH$S"
            "(rhG~qVzuV57R<%o86<`Q%(p_JNIDcH@g-={TXN<HZW_KZ#7DE8cCu<jzn=mP^$tAv)q?C!s|^G<N;bZvpRC&KEz;)hy`w7Y?Cu-"
            "TD;yY*rl9#y~ocdUc0PQId=e~^=JWM3xwJ#1<e9mBa!VnCrJpxRjuMOMKZPh|M52{wJ-f(EdXTz04O{?Jv}`E03}e177vS&"
        ),
    }.items()
}
"""Width of an element in bytes -> what kvcore-zstd 0.1.0 wrote for `payload_of(width)` under the tag `zstd/1`."""
