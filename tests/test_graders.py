"""Tests of graders on tables of answers that have been judged right or wrong.

Further tests make small changes that turn right answers into wrong ones, and feed the graders
random texts, and texts that are made to crash them or to keep them busy forever.
"""

import json
import math
import random
import re

import pytest

from eval import (
    GRADERS,
    Problem,
    failure,
    final_answer,
    grade,
    own_grader,
    pick_letter,
    same_math,
    same_short,
)
from train_runs import end_of, launch
from workers import load_function


def rows(table: str) -> list[tuple]:
    """Return pairs (answer, gold answer) from a table whose lines end with the gold answer."""
    lines = [line.split(" ¦ ") for line in table.strip().split("\n")]
    return [(answer.strip(), gold.strip()) for *answers, gold in lines for answer in answers]


RIGHT = r"""
\dfrac{1}{2} ¦ \tfrac12 ¦ \frac1{2} ¦ 1/2 ¦ .5 ¦ 0.50 ¦ 2/4 ¦ \frac{1/2}{1} ¦ ½ ¦ \left(\frac12\right) ¦ 0.5
137 1/2 ¦ 137\frac{1}{2} ¦ \frac{275}{2} ¦ 137.5
-2\frac12 ¦ \frac{-5}{2} ¦ \frac{5}{-2} ¦ −2.5 ¦ -\frac52
25°C ¦ 25 °C ¦ 25℃ ¦ 25 degrees Celsius ¦ 25
1,000 ¦ 1{,}000 ¦ 1,\!000 ¦ 1\,000 ¦ 1e3 ¦ 10^3 ¦ 1.0 \times 10^{3} ¦ 1 x 10^3 ¦ \$1,000 ¦ 1000
20\% ¦ 20% ¦ 20 percent ¦ 20\,\% ¦ 0.2
20\% ¦ 20
60^\circ ¦ 60^{\circ} ¦ 60° ¦ 60 degrees ¦ 60\degree ¦ \angle ABC = 60^\circ ¦ 60
5 cm ¦ 5~\mathrm{cm} ¦ x = 5\text{ cm} ¦ 5\mbox{ inches} ¦ 5 units ¦ 5 people ¦ 5.0 ¦ 5
135 ft^2 ¦ 135 square feet ¦ 135\text{ sq. ft} ¦ 135 ¦ 135\text{ square feet}
5000 m ¦ 5{,}000\text{ meters} ¦ 5 kilometers ¦ 5\text{ km}
50\text{ cents} ¦ \$ 0.50 ¦ 0.5 dollars ¦ \$0.50
\$1.5\text{ million} ¦ \$1,500,000
5\text{ kg}\cdot\text{m/s}^2 ¦ 5\text{ N}
$5$ ¦ \(5\) ¦ 5. ¦ \boldsymbol{5} ¦ {5} ¦ \displaystyle 5 ¦ |-5| ¦ \text{5} ¦ x=5 ¦ 5
2\sqrt{3} ¦ 2√3 ¦ sqrt(12) ¦ \frac{6}{\sqrt3} ¦ \sqrt{12}
\frac{\sqrt5-1}{2} ¦ \frac{2}{1+\sqrt5}
2^{10} ¦ 2^10 ¦ 2¹⁰ ¦ 1024
\sqrt[3]{8} ¦ 4^{1/2} ¦ \log_3 9 ¦ \log_{3} 9 ¦ \log 100 ¦ 2
\pi/6 ¦ \frac16\pi ¦ \frac{\pi}{6}
\sin 30^\circ ¦ \cos 60° ¦ \sin(\frac{\pi}{6}) ¦ \frac12
3i + 2 ¦ 2 + 3i
(1+i)^2 ¦ \frac{4}{-2i} ¦ 2i
e^{i\pi/3} ¦ \cos\frac{\pi}{3}+i\sin\frac{\pi}{3} ¦ \frac{1+i\sqrt{3}}{2}
\arctan 1 ¦ \sin^{-1}\frac{\sqrt2}{2} ¦ \frac{\pi}{4}
\frac{x}{7}+\frac27 ¦ (x+2)/7 ¦ y = \frac{x+2}{7} ¦ h^{-1}(x)=\frac{x+2}{7} ¦ \frac{x+2}{7}
(3p^2+4)(2p^2-1) ¦ 6p^4+5p^2-4
\sin x\cos x ¦ \cos x \sin x ¦ \frac12\sin 2x
\sin^2\theta ¦ \sin(\theta)^2 ¦ 1-\cos^{2}\theta
x_2x_{1}+1 ¦ 1+x_1x_2
k_B\theta ¦ \theta k_B
|x-3| ¦ \left|3-x\right|
1 and -3 ¦ -3, 1 ¦ x=1 or x=-3 ¦ \{1,-3\} ¦ -1\pm2 ¦ 1; -3 ¦ 1,-3
x=1, y=2 ¦ y=2, x=1
(x, y) = (1,2) ¦ \left( 1, 2 \right) ¦ (1.0,2) ¦ (1,2)
\varnothing ¦ \{\} ¦ ∅ ¦ \emptyset
x >= 3 ¦ 3 \leq x ¦ x \geq 3
x \in [3,\infty) ¦ x \geq 3 ¦ 3 \leq x ¦ [3,\infty)
1 < x \leq 2 ¦ 2 \geq x > 1 ¦ (1,2]
(-\infty,-8)\cup(8,\infty) ¦ x<-8\text{ or }x>8 ¦ (8,\infty)\cup(-\infty,-8)
\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} ¦ \begin{pmatrix} 1&\frac42\\3&4\\ \end{pmatrix}
Devon, navin ¦ \text{Navin}, \text{Devon}
\frac{12}{7} \approx 1.71 ¦ \frac{12}{7}
2516_{8} ¦ (2516)_8 ¦ 2516_{\text{eight}} ¦ (2516)_{8} ¦ 2516\text{ (base 8)} ¦ 2516_{\text{base }8} ¦ 2516_8
√3/2 ¦ \sqrt3/2 ¦ sqrt3/2 ¦ (√3)/2 ¦ \sqrt{3}/2 ¦ √(3)/2 ¦ \dfrac{\sqrt 3}2 ¦ √(3/4) ¦ \frac{\sqrt{3}}{2}
√2/2 ¦ \sqrt2/2 ¦ sqrt2/2 ¦ 1/√2 ¦ 1/sqrt2 ¦ 2^{-1/2} ¦ \frac{\sqrt{2}}{2}
5√3/6 ¦ 5\sqrt3/6 ¦ (5√3)/6 ¦ 5sqrt(3)/6 ¦ \frac{5\sqrt{3}}{6}
-√3/3 ¦ −\sqrt3/3 ¦ -1/√3 ¦ -\frac{\sqrt{3}}{3}
3+√69/3 ¦ 2√69/6+3 ¦ (9+√69)/3 ¦ 3+\frac{\sqrt{69}}{3}
∛2 ¦ \sqrt[3]2 ¦ 2^(1/3) ¦ \sqrt[3]{2}
\sqrt[3]{x^2} ¦ (x^2)^{1/3} ¦ \left(\sqrt[3]{x}\right)^2 ¦ x^{2/3}
{7 \over 4} ¦ \frac 74 ¦ \frac 7 4 ¦ 1¾ ¦ 1\,\frac{3}{4} ¦ 7/4
0.\overline{3} ¦ .\bar{3} ¦ 0.\bar3 ¦ 0.3\overline{3} ¦ 0.\dot{3} ¦ \frac{1}{3}
-1.1\overline{6} ¦ -\frac76
(-1)^{2023} ¦ -1^{3000} ¦ -1
-1,234 ¦ −1{,}234 ¦ -1\,234 ¦ -1,\!234 ¦ - 1,234 ¦ -1 234 ¦ x=-1,234 ¦ -1234
14 400 ¦ 14\ 400 ¦ 14~400 ¦ 14{,}400\text{ ft} ¦ 14.4 thousand ¦ 14,\!400
1 billion ¦ 1\text{ billion} ¦ 1\,000\,000\,000 ¦ 1,\!000,\!000,\!000
US\$115,000 ¦ 115{,}000\text{ dollars} ¦ 115 thousand dollars ¦ \$115,\!000
50¢ ¦ 50\text{ cents} ¦ \$0.50
20 per cent ¦ 20\%
5 cubic inches ¦ 5 gallons ¦ 5 lbs ¦ 5 years ¦ 5 years old ¦ 5 mph ¦ 5 students ¦ 5 weeks ¦ 5 children ¦ 5
125\text{ cubic feet} ¦ 125 ft^3 ¦ 125
5 miles per hour ¦ 5 mph
π/3 radians ¦ \frac{\pi}{3}\text{ radians} ¦ \frac{\pi}{3} rad ¦ \frac{\pi}{3}
180 deg ¦ 180^\circ
x_1=1, x_2=-3 ¦ x_{1} = 1, \quad x_{2} = -3 ¦ x_1=-3\text{ or }x_2=1 ¦ 1,-3
\big(7,6\big) ¦ \bigl(7, 6\bigr) ¦ \Bigg(7,6\Bigg) ¦ (7,6)
\mathbb{R} ¦ \mathbb R ¦ ℝ ¦ x \in \mathbb{R} ¦ \text{all real numbers} ¦ (-inf, inf) ¦ (-\infty,\infty)
(-∞, -8) U (8, ∞) ¦ (-\infty,-8)\cup(8,\infty)
\begin{pmatrix} \dfrac{1}{2} \\[4pt] 3 \end{pmatrix} ¦ \begin{pmatrix} 1/2 \\ 3 \end{pmatrix}
\csc x ¦ csc(x) ¦ \frac{1}{\sin x}
\sec\theta ¦ sec θ ¦ 1/\cos\theta
\cot^2 x ¦ \csc^2 x-1 ¦ \frac{\cos^2x}{\sin^2x}
5! ¦ 5\cdot4! ¦ \frac{6!}{3!} ¦ 120
2x+4y=3 ¦ 3=2x+4y ¦ 4y + 2x = 3 ¦ 2x+4y-3=0
x^2+y^2-25=0 ¦ x^2+y^2=25
m+n=5 ¦ = 5 ¦ 2+3=5 ¦ x=\frac{10}{2}=5 ¦ 5
\frac{1}{2} g ¦ \frac{1}{2}g ¦ g/2 ¦ \frac{g}{2}
\frac{3}{4}=0.75 ¦ \frac{3}{4}\,\mathrm{m}^2 ¦ \frac{3}{4} m ¦ \frac{3}{4}
1:03 p.m. ¦ 1:03 pm ¦ 1:03 \text{ p.m.} ¦ \text{1:03 PM}
\{-2\} ¦ x \in \{-2\} ¦ \lbrace -2 \rbrace ¦ \{x=-2\} ¦ -2
\{x=1, x=-3\} ¦ x=1 \lor x=-3 ¦ 1,-3
\{(1,2),(3,4)\} ¦ (x,y) \in \{(1,2),(3,4)\} ¦ (1,2),(3,4)
(a,b,c,d)=(1,2,3,4) ¦ (1,2,3,4)
(h,k) = (1,2) ¦ (x_1,x_2)=(1,2) ¦ \vec{v}=(1,2) ¦ (A,B)=(1,2) ¦ (1,2)
1⁄2 ¦ 1∕2 ¦ \nicefrac{1}{2} ¦ \frac{1}{2}
3{,}14 ¦ 3.14
120 sec ¦ 120\text{ secs} ¦ 120 litres ¦ 120 metres ¦ 120 arrangements ¦ 120 \mathsf{m} ¦ 120 \operatorname{cm} ¦ 120
2\sec x ¦ 2 sec x ¦ 2 sec(x) ¦ \frac{2}{\cos x}
\text{USD } 18.90 ¦ USD 18.90 ¦ 18.9 USD ¦ \$18.90
"""
WRONG = r"""
5.01 ¦ 6 ¦ 55 ¦ -5 ¦ 5x ¦ 5i ¦ \pm 5 ¦ 5, 6 ¦ 5 or 6 ¦ (5 ¦ 5) ¦ 5! ¦ 5^2 ¦ 5\% less ¦ 5\%\% ¦ 5\approx 6 ¦ 5
0.333 ¦ 0.33333333 ¦ 2\frac13 ¦ \frac{1}{3}
3.14 ¦ 3.14159265358979 ¦ \frac{22}{7} ¦ \frac{355}{113} ¦ 180 ¦ \pi
1.4142135623730951 ¦ \frac{14142135623}{10000000000} ¦ \sqrt{2}+10^{-20} ¦ \sqrt{2}
? ¦ ¦ none ¦ \neq 5 ¦ \text{not }5 ¦ about 5 ¦ 5 squared ¦ 5th ¦ 5\text{ or less} ¦ x>5 ¦ 1/0 ¦ 5 million ¦ 5
0.2\% ¦ 2\% ¦ 20
5\text{ m} ¦ 6 cm ¦ 5\text{ cm}^2 ¦ 5\text{ s} ¦ 5\text{ cm}
5 MW ¦ 5 W ¦ 5\text{ mW}
3 minutes ¦ 3 days ¦ 3 hours
20% decrease ¦ 20% increase
\$5 ¦ 5 dollars ¦ 5 cents
(2,1) ¦ [1,2] ¦ (1,2] ¦ 1,2 ¦ (1,2,3) ¦ (x=2,y=1) ¦ (y,x)=(1,2) ¦ (y=1,x=2) ¦ 1 ¦ (1,2)
1 ¦ 1,3 ¦ 1,-3,5 ¦ 1,1 ¦ (1,-3) ¦ -1,3 ¦ 1,-3
(1,4),(3,2) ¦ (1,3),(2,4) ¦ (1,2,3,4) ¦ (1,2),(3,4)
y=3, x=2 ¦ x=3, y=2
x=6 ¦ y=5 ¦ x=5 \text{ if } y>0 ¦ 2x=10 ¦ x^2=25 ¦ x=5
x<3 ¦ x\ge 3 ¦ y>3 ¦ (-\infty,3) ¦ 3 ¦ x>3
(-\infty,-8]\cup(8,\infty) ¦ (-\infty,8) ¦ (-\infty,-8),(8,\infty) ¦ (-\infty,-8)\cup(8,\infty)
\begin{pmatrix}2\\1\end{pmatrix} ¦ \begin{pmatrix}1&2\end{pmatrix} ¦ (1,2) ¦ \begin{pmatrix}1\\2\end{pmatrix}
\infty ¦ 1000 ¦ -\infty
x-1 ¦ |x+1| ¦ x^2+1 ¦ y+1 ¦ 2x ¦ x+1
\sin x/2 ¦ \sin(x/2)
1/2x ¦ \frac{1}{2x}
2^3^2 ¦ 512
|x| ¦ -x ¦ \sqrt{x^2} ¦ x
x^{100}+x ¦ x^{100}+1 ¦ x^{100}
2^{9000} ¦ 2^{9001}
e^{-1000} ¦ 10^{-300} ¦ 0
y=2x+4 ¦ y=3x+2 ¦ x=2y+3 ¦ y=2x+3
f(x)+f(y) ¦ f(x+y)
A^{-1}B^{-1} ¦ B^{-1}A^{-1}
11 ¦ 3 ¦ 11_3 ¦ 11_2
1900-1904 ¦ 1914-1918
Navin ¦ not Devon ¦ Devon or Navin ¦ Devon
ACB ¦ abc ¦ ABC
1002^2-502^2+298^2-202^2 ¦ 800000
\frac{\sqrt2}{2}(x+1) ¦ \sqrt2/2(x+1) ¦ \sqrt{x+1} ¦ \sqrt[3]{x+1}
√2/2 ¦ √(3/2) ¦ 2/√3 ¦ \sqrt{3}/4 ¦ \sqrt32 ¦ 3/2 ¦ 2\frac32 ¦ \frac{\sqrt{3}}{2}
x^{3/2} ¦ x^2/3 ¦ \sqrt{x^3} ¦ x^{-2/3} ¦ \sqrt[3]{x^2}
\sqrt{x^2} ¦ \sqrt{-x}^2 ¦ \ln e^{-x} ¦ x
\ln x ¦ \ln|x|
\frac{dy}{x^2} ¦ \frac{d^2y}{dx} ¦ \frac{y}{x^2} ¦ \frac{d^2y}{dx^2}
y/x ¦ \frac{y}{x} ¦ \frac{dy}{dx}
0.\overline{4} ¦ 0.0\overline{3} ¦ 0.\overline{31} ¦ 1.\overline{3} ¦ 0.\overline{3}\overline{1} ¦ \frac{1}{3}
1,234 ¦ -1,23 ¦ -1, 234 ¦ -12,34 ¦ -1.234 ¦ 234 ¦ -1234
12 345 ¦ (12,345)
100\,200 ¦ 100 200 ¦ (100, 200)
5 dozen ¦ 5 thousand ¦ 5 hundred ¦ 5 billion ¦ 5 halves ¦ 5 quarters ¦ 5 pairs ¦ 5 more ¦ 5 less ¦ 5 or more ¦ 5
5 gallons ¦ 5 square inches ¦ 5 cubic feet ¦ 5 inches ¦ 5 cubic inches
5 hours ¦ 5 months ¦ 60 ¦ 5 years
60^\circ ¦ \pi/3 degrees ¦ \pi/6 radians ¦ \frac{\pi}{3}
x_1=1, x_2=3 ¦ x_1=1, y_2=-3 ¦ x_1=1 ¦ x_1=1, x_2=-3, x_3=0 ¦ 1,-3
x_2=1, x_1=2 ¦ x_1=1, x_3=2 ¦ x_1=1, x_2=2
\big(6,7\big) ¦ \big(7,6\big] ¦ \big\{7,6\big\} ¦ (7,6)
\mathbb{Z} ¦ \mathbb{R}^2 ¦ \mathbb{R}\setminus\{0\} ¦ [0,\infty) ¦ all real numbers except 0 ¦ (-\infty,\infty)
2516_9 ¦ (2516)_9 ¦ 2516_{\text{nine}} ¦ 2516_{88} ¦ 2517_8 ¦ 2516_8
5 ¦ x+y=6 ¦ x-y=5 ¦ x+y=5
4=5 ¦ 2+4=5 ¦ x+1=5 ¦ 5=x+1 ¦ 5
4! ¦ 5!! ¦ (5!)! ¦ -5! ¦ 5!+1 ¦ 120
n!! ¦ (n+1)! ¦ n ¦ n!
200! ¦ 200!+1
e^{709.7}+ie^{709.7} ¦ 5 ¦ e^{709.7}+ie^{709.6}
\sec x ¦ \frac{1}{\cos x} ¦ \csc 2x ¦ \csc x
2x+4y=-3 ¦ 2x+4y+3=0 ¦ x+2y=3 ¦ 2x-4y=3 ¦ 2x+4y-3 ¦ 2x+4y<3 ¦ 2x+4y=2x+4y ¦ 2x+4y-3=0
y-2x=3 ¦ 2x-y+3=0 ¦ y=2x+3
1:03 AM ¦ 1:30 PM ¦ 13:03 ¦ \text{1:03 PM}
\{\emptyset\} ¦ \{0\} ¦ \{\} \cup \{0\} ¦ \emptyset
\{-2, 3\} ¦ \{\{-2\}\} ¦ y \in \{-2\} ¦ x=-2
(1,4),(3,2) ¦ (y,x) \in \{(1,2),(3,4)\} ¦ \{1,2,3,4\} ¦ (1,2),(3,4)
(k,h)=(1,2) ¦ (d,c)=(1,2) ¦ (1,2)
3{,}141 ¦ 3{,}1,4 ¦ 3{,}15 ¦ 3.14
(1{,}000,2) ¦ (1,2)
"""


@pytest.mark.parametrize("answer, gold", rows(RIGHT))
def test_the_same_mathematics(answer, gold):
    assert same_math(answer, gold) and same_math(gold, gold)
    assert same_math(f" {gold}. ", gold) or gold.endswith(".")
    assert same_math(final_answer(rf"So it is \boxed{{{answer}}}, as was asked."), gold)


@pytest.mark.parametrize("answer, gold", rows(WRONG))
def test_other_mathematics(answer, gold):
    assert not same_math(answer, gold)


def test_polynomials_their_expansions_and_one_spoilt_term():
    """(x - r)^n equals its expansion, but not an expansion with one coefficient off by 1."""
    rng = random.Random(2)
    for n in (2, 3, 8, 20, 30):
        root = rng.randint(-9, 9)
        coefficients = [(-root) ** k * math.comb(n, k) for k in range(n + 1)]
        terms = [f"{c:+d}x^{{{n - k}}}" for k, c in enumerate(coefficients)]
        assert same_math(f"(x {-root:+d})^{{{n}}}", "".join(terms))
        spoilt = rng.randrange(n + 1)
        terms[spoilt] = f"{coefficients[spoilt] + 1:+d}x^{{{n - spoilt}}}"
        assert not same_math(f"(x {-root:+d})^{{{n}}}", "".join(terms))


GOLDS = r"""\frac{12}{7} ¦ -5 ¦ 0.25 ¦ 3\sqrt{3} ¦ \frac{5\pi}{4} ¦ 4x^2-6x+4 ¦ (3,-3,1) ¦ -15+8i ¦ 1,-3
    ¦ \frac{2a+b}{2} ¦ 5\text{ km} ¦ 135\text{ square feet} ¦ (-\infty,-8)\cup(8,\infty) ¦ 2x+3y=7 ¦ x>=4
    ¦ \begin{pmatrix}1&-2\\3&4\end{pmatrix} ¦ 60^\circ ¦ 2+\sqrt{7} ¦ \$6.50"""
SPOILS = (
    ("+", "-"),
    ("-", "+"),
    ("[", "("),
    (")", "]"),
    ("x", "y"),
    ("a", "c"),
    ("km", "m"),
    ("feet", "in"),
    ("square ", ""),
    (">=", ">"),
    (r"\sqrt", ""),
    (r"\pi", ""),
    (r"\cup", ","),
    ("i", "j"),
)


@pytest.mark.parametrize("gold", [gold.strip() for gold in GOLDS.split(" ¦ ")])
def test_rewritten_answers_are_right_and_spoilt_ones_wrong(gold):
    """A gold answer in a different spelling is right.

    It is wrong if a digit, a sign, a bracket, a letter, a command or a unit in it changes, or if
    words or symbols are added.
    """
    fraction = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}")
    for same in (
        f"${gold}$",
        rf"\({gold}\)",
        f" {gold} . ",
        gold.replace("+", " + ").replace(",", ", "),
        gold.replace(r"\frac", r"\dfrac"),
        fraction.sub(r"\1/\2", gold),
        gold.replace("-", "−"),
    ):
        assert same_math(same, gold), same
    beside = (" or 0", r"\text{ or more}", "!", "^2", "?", r" \pm 1", ", 17", r"\ldots", "07")
    spoilt = {gold + more for more in beside} | {
        rf"\text{{not }} {gold}",
        rf"\neg {gold}",
        f"-{gold}",
    }
    for m in re.finditer(r"\d", gold):
        spoilt.add(gold[: m.start()] + str((int(m[0]) + 1) % 10) + gold[m.end() :])
    spoilt.update(gold.replace(old, new, 1) for old, new in SPOILS)
    for wrong in spoilt - {gold}:
        assert not same_math(wrong, gold), wrong


SHORT_RIGHT = r"""
paris ¦ Paris. ¦ "Paris" ¦ Paris
An increase in demand ¦ Increase In Demand ¦ increase in demand
Free-market economy ¦ free market economy
The mitochondria. ¦ mitochondria
9.8 m/s^2 ¦ 9.8 m/s² ¦ 9.8 m s^-2 ¦ 9.81 ¦ \approx 9.81 ¦ 9.81 m/s^2
25% ¦ 0.25
8.314 J/(mol·K) ¦ 8.314 J mol^{-1} K^{-1} ¦ 8.314 J/mol K
\text{H}_2\text{SO}_4 ¦ H₂SO₄ ¦ H2SO4
\frac{\pi}{2} ¦ 1.57
about 5.3 ¦ approximately 5.3 ¦ 5.30 ¦ 5.3
13.60 eV ¦ 13.6 \text{ eV} ¦ 13.6 ¦ 0.0136 keV ¦ 13.6 eV
4.20 furlongs ¦ 4.2 furlongs
0.5 μm ¦ 5 \times 10^{-7} m ¦ 500 ¦ 500 nm
2.5 kHz ¦ 2500 Hz ¦ 2500 s^{-1} ¦ 2.50 kHz
2.0 kcal/mol ¦ 2.01 kcal/mol
An increase in X and Y ¦ increase in X and Y
ΔH = -285.8 kJ/mol ¦ \Delta H^\circ = -285.8 kilojoules per mole ¦ -285.8 kJ/mol
20 newtons ¦ 20 Newtons ¦ 20 N
0.05 mol/L ¦ 50 mM ¦ 0.050 M ¦ 0.05 M
25 m/sec ¦ 25 metres per second ¦ 25 m/s
~5.3 ¦ ~ 5.3 ¦ 5.3
\ce{CO2} ¦ \ce{CO_2} ¦ CO2
"""
SHORT_WRONG = r"""
London ¦ ¦ not Paris ¦ Paris, France ¦ Paris or London ¦ 5 ¦ Paris
CO ¦ C2O ¦ CO2
Fe³⁺ ¦ Fe^{2+}
9.6 ¦ 9.8 m/s ¦ -9.81 ¦ 9.81 s ¦ 9.81 m/s^2
1939 ¦ 1944 ¦ 1944.9 ¦ 1945
500 mm ¦ 500 ns ¦ 500 nm
4.2 leagues ¦ 4.1 furlongs ¦ 4.2 furlongs
13.6 keV ¦ 13.6 J ¦ 12.6 eV ¦ 13.6 eV or 14 eV ¦ 13.6 eV
1.06 xy ¦ 1.05 xy
about 5.4 ¦ not about 5.3 ¦ at most 5.3 ¦ ~5.4 ¦ 5.3
ΔS = -285.8 J/mol ¦ ΔH = 285.8 kJ/mol ¦ -285.8 kJ/mol
20 joules ¦ 20 watts ¦ 20 N
0.05 mol ¦ 0.05 mM ¦ 0.05 M
"""


@pytest.mark.parametrize(
    "answer, gold, right",
    [(*row, True) for row in rows(SHORT_RIGHT)] + [(*row, False) for row in rows(SHORT_WRONG)],
)
def test_short_answers(answer, gold, right):
    assert same_short(answer, gold) is right


COMMITTED = [
    (r"so \boxed{5}", "5"),
    (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{7}", "7"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"our answer is $\boxed 2$.", "2"),
    ("<answer> 5 </answer>", "5"),
    ("<answer>1</answer> no, <answer>2</answer>", "2"),
    (r"<answer>5</answer> \boxed{6}", "6"),
    (r"<answer>\boxed{5}</answer>", "{5}"),
    ("<answer>a\nb</answer>", "a\nb"),
    (r"\boxed{5}, \boxed{6}", "5, 6"),
    (r"$x=\boxed{5}$ or $x = \boxed{6}$", "5, 6"),
    (r"\boxed{5}, then \boxed{6}", "6"),
    (r"\boxed{5}, \quad \boxed{6}", "5, 6"),
    (r"x = \boxed{5} \qquad x = \boxed{6}", "5, 6"),
    ("The answer is clearly 5, not 6.", "5"),
    ("Now 3 is not a solution\nThe answer is 5.", "5"),
    (r"So $\boxed{6},$ our answer.", "6"),
    (r"The answer is $\boxed{6},$ because $2+4=6$.", "6"),
    (r"$(100 - 64)\% = \boxed{36} \%$.", r"36\%"),
    (r"$\boxed{36}$%", r"36\%"),
    (r"\boxed{7}. (Final answer in \boxed{} format.)", "7"),
    ("<answer>7</answer>\n<answer></answer>", "7"),
    ("The answer is:\n$$\n12\n$$", "12"),
    ("The answer is:\n\\[\n12\n\\]", "12"),
    ("Therefore\n\\[\nx = 5\n\\]", "x = 5"),
    ("<answer>The answer is 5.</answer>", "5"),
    ("<answer>The answer is not 5.</answer>", "not 5"),
    ("<answer>5 because 2 + 3 = 5.</answer>", "5"),
    ("The answer is therefore 5.", "5"),
    (r"So the answer is \(5\), as desired.", r"5\)"),
    ("x=3\nx=5", "x=5, x=3"),
    ("So:\n- $x_1 = 3$,\n\n- $x_2 = 5$.", "- $x_2 = 5, x=3"),
    ("The answer is x=3\nx=5", "x=3, x=5"),
    ("x = 2 + 3\nx = 5", "x = 5"),
    ("x = 2y + 3\nx = 5", "x = 5"),
    *(
        (text, "")
        for text in (
            "",
            "<answer>5",
            r"\boxed{5} and then \boxed{6",
            r"\boxed{}",
            r"-\boxed{5}",
            r"\boxed{5}^2",
            r"\boxed{5}/6",
            r"\sqrt{\boxed{5}}",
            r"x\neq\boxed{5}",
            r"not $\boxed{5}$",
            r"\boxed{5} or $6$",
            r"\boxed{5} \times 10^3",
            r"$\boxed{5}$ million",
            r"\boxed{5}, 6",
            r"$\boxed{5}$, $6$",
            r"$\boxed{5}$, $-6$",
            r"\boxed{5} dozen",
            r"\boxed{5}\text{ thousand}",
            r"\boxed{5}i",
            r"2\boxed{5}",
        )
    ),
    *(
        (text.format(r"\boxed{5}"), "5")
        for text in (
            "So $x={}$.",
            r"\[ {} \]",
            "**{}**",
            "{} units",
            r"{} \mathrm{{~cm}}",
            "Step 3: {}",
            "2\n{}",
            r"{}\pmod{{13}}",
            "**Answer**\n\n$${}$$",
            "So it is:\n- **${}$**",
            "$${}$$\n\n- $x=3$ is excluded.",
            "${}$ m/s",
            "{}\n\n6",
        )
    ),
    ("Adding up.\nThe answer is **12**", "12"),
    (" 42 \n", "42"),
    ("The answer is 5 because 2 + 3 = 5. No other value works.", "5"),
    ("So we get\n\n42", "42"),
    ("Final answer:\n5.\nThat is all.", "5"),
    ("I doubt. " * 12, ""),
    *(
        (f"{before} the answer is 5.", "")
        for before in (
            "It is not true that",
            "If x is 3,",
            "I doubt that",
            "So if not,",
            "An incorrect",
        )
    ),
    ("Since x is not 0, y cannot be 3, so the answer is 5.", "5"),
]


@pytest.mark.parametrize("response, answer", COMMITTED)
def test_what_a_response_answers(response, answer):
    assert final_answer(response) == answer


CHOICES = ["mitochondria", "The nucleus.", "a ribosome", "All of the above"]
LETTERS = [
    *(
        (form.format("B"), "B")
        for form in (
            "<answer>{}</answer>",
            r"\boxed{{{}}}",
            "Answer: ({})",
            r"\boxed{{\text{{{}}}}}",
            "{}.",
            "({})",
            "option {}",
            "Long thoughts.\n\n**{}**",
            "So option {} is correct.",
            "Is it A or B? Let us see.\nAnswer: {}",
            "The answer is {} because A and C say less.",
            "The answer is likely ({}).",
            "The answer is {}, not A.",
            "The answer is ({}), rather than (A) or (C).",
            "The answer is **{}. The nucleus**.",
            "The answer is the nucleus ({}).",
            "The correct answer is the nucleus (option {}).",
            "<answer>{} - the nucleus</answer>",
            "<answer>{} because all others are not cells.</answer>",
            "<answer>{}. The nucleus.</answer>",
            "<answer>{} (The nucleus.)</answer>",
            r"\boxed{{\text{{{}. The nucleus.}}}}",
            "Let me check each option:\n\nA) This is wrong.\nB) This fits.\n\nFinal answer: {}",
            "The answer choices:\n\n(A) no\n(B) maybe\n\nThe answer is {}.",
            "Thus {} is the right answer.",
            "**{}** is the answer.",
            "It must be {}.",
            "I choose {}.",
            "The answer is most likely {}!",
            "The answer is indeed `{}`.",
            "A: no\nB: yes\nC: wrong\nAnswer: {}",
            "The answer is not A. It stores no DNA. The answer is {}.",
            "The correct answer is {}, “The nucleus.”",
            r"\boxed{{\text{{Option {}}}}}",
            r"\boxed{{{}. \text{{The nucleus}}}}",
            "A and C are not possible, so the answer is {}.",
        )
    ),
    ("<answer>b. the nucleus</answer>", "B"),
    ("<answer>Nucleus</answer>", "B"),
    ("Answer: a ribosome.", "C"),
    ("The answer is A. <answer>B</answer>", "B"),
    ("The answer is B. Yes, the answer is B.", "B"),
    *(
        (text, None)
        for text in (
            "",
            "I am not sure.",
            "<answer>A",
            "<answer>E</answer>",
            "<answer>A or B</answer>",
            "The answer is not A.",
            "The answer is A.\nThe answer is B.",
            "The answer is a bird.",
            "A ribosome makes proteins.",
            "<answer>(A) the nucleus</answer>",
            "<answer>B (mitochondria)</answer>",
            "A. no\nB. no\nC. yes\nD. no",
            "(A) mitochondria\n(B) the nucleus\n(C) a ribosome",
            "<answer>B. Mitochondria</answer>",
            "<answer>mitochondria (B)</answer>",
            "<answer>A\nB</answer>",
            "The closest is (C), which is not correct.",
            "The answer is (C), which is not correct.",
            "Let us see.\n\nA. This one says",
            "Let us see.\n\nA. Mitochondria\nB. The nuc",
            "Let me analyze each option:\n\nA) mitochondria\nB) the nucleus",
            "Statements I. and II. are true.",
            "The answer is I and II.",
            "Which is right? A? B?",
            "I doubt the answer is B.",
            "If A is not possible, then the answer is B.",
            "Is B not the answer? The incorrect option is B.",
            "The answer is B? No.",
            "The answer isn't B.",
            "Answer: A/B",
            "The answer is unlikely (B).",
            "The answer is not A. The answer is not B.",
            "I doubt that it must be B.",
            "It is not B.",
            "Answer: not (B)",
        )
    ),
]


@pytest.mark.parametrize("response, letter", LETTERS)
def test_letters(response, letter):
    assert pick_letter(response, CHOICES) == letter


def test_letters_of_odd_choices():
    odd = ["15x + 15", "–15x + 18", "( 'a', 2 )", "isupper()"]
    for letter, text in zip("ABCD", odd):
        for form in (
            f"{letter}. {text}",
            f"{letter}\n{text}",
            f"{letter} ({text})",
            f"({letter}) {text}.",
        ):
            assert pick_letter(f"<answer>{form}</answer>", odd) == letter, form
    assert pick_letter("<answer>B</answer>", ["B", "A"]) == "B"  # the letter, not the text of A
    assert pick_letter("<answer>7</answer>", ["7", "7", "8"]) is None
    assert pick_letter("<answer>C. elegans</answer>", ["E. coli", "C. elegans", "yeast"]) == "B"
    assert pick_letter("<answer>mW</answer>", ["MW", "W", "kW"]) is None
    both = ["A only", "B only", "neither", "A and B only"]
    assert pick_letter("<answer>D. A and B only</answer>", both) == "D"
    assert pick_letter("The answer is A and B only.", both) == "D"
    reasons = ["It falls. Then it rises.", "It rests because of friction", "It rises.", "It stops"]
    for letter, text in zip("ABCD", reasons):
        for form in ("The answer is {}. {}", "Answer: {1} ({0})", "<answer>{}: {}</answer>"):
            assert pick_letter(form.format(letter, text), reasons) == letter, form


@pytest.mark.parametrize(
    "answer, question, gold, right",
    [
        *(
            (form.format(r"\sqrt{192}"), r"Simplify $\sqrt{192}$.", r"8\sqrt3", False)
            for form in (
                "{}",
                r"\,{}",
                "x = {}",
                "{} + 0",
                r"1 \cdot {}",
                "{}/1",
                r"\frac{{{}}}{{1}}",
            )
        ),
        (r"8\sqrt{3}", r"Simplify $\sqrt{192}$.", r"8\sqrt3", True),
        (r"\frac{27}{30}", r"Reduce $\frac{27}{30}$ to lowest terms.", r"\frac{9}{10}", False),
        ("(x + 1)(x+2)", "Expand $(x+1) (x+2)$.", "x^2+3x+2", False),
        (r"\frac{2}{3}", r"Which is larger, $\frac{2}{3}$ or $\frac{3}{5}$?", r"\frac23", True),
        ("50^\\circ", r"Find $x$, where $\tan x = \cos 50^{\circ}$.", r"50^\circ", True),
        ("2", "What is $2+2-2$?", "2", True),
        ("5!", "What is $5!$?", "120", False),
        ("5!", "How many orders of 5 people are there?", "120", True),
    ],
)
def test_to_repeat_the_questions_formula_is_no_answer(answer, question, gold, right):
    assert grade(Problem("p", question, gold, "math"), rf"\boxed{{{answer}}}") is right


def test_why_an_answer_is_wrong_and_whether_two_agree():
    problem = Problem("p", "How many?", "42", "math")
    assert problem.kind == "math" and failure(problem, r"\boxed{42.0}") == ""
    assert failure(problem, r"\boxed{41}") == "answered 41"
    assert failure(problem, "I have no idea how to go about " * 10) == "no answer found"
    agree = GRADERS["math"].agree
    assert agree(problem, r"\boxed{0.5}", r"It is \boxed{\frac12}.") and not agree(problem, "", "")
    assert not agree(problem, r"\boxed{1}", r"\boxed{2}")
    letters = Problem("p", "Which?", "B", "letter", extra={"choices": CHOICES})
    assert grade(letters, "<answer>nucleus</answer>")
    assert [GRADERS["letter"].agree(letters, "B.", other) for other in ("Answer: (b)", "?")] == [
        True,
        False,
    ]


def test_exact_ignores_case_marks_and_spaces_at_the_ends_and_same_ignores_nothing():
    paris = Problem("p", "The capital?", "Paris", "exact")
    for response in (
        "paris",
        " Paris. ",
        "**Paris**",
        "<answer>Paris!</answer>",
        r"It is \boxed{Paris}",
    ):
        assert grade(paris, response), response
    for response in ("Par is", "Paris, France", "", "It is Paris", "-Paris"):
        assert not grade(paris, response), response
    shouted = Problem("p", "Shout: monkey", "MONKEY", "same")
    assert (
        grade(shouted, "MONKEY") and not grade(shouted, "monkey") and not grade(shouted, "MONKEY.")
    )


def test_a_grader_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def grade(problem, response):\n    return len(response) <= 3\n")
    own = own_grader(load_function(f"{file}:grade"))
    problem = Problem("p", "Be short.", "", "exact")
    assert own.check(problem, "yes") == "" and own.check(problem, "certainly") != ""
    with pytest.raises(ValueError, match="grader failed on p: TypeError"):
        own.check(problem, None)
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "worse.py").write_text("def grade(:\n")
    for spec in (
        f"{file}:judge",
        "none.py:grade",
        f"{tmp_path}/bad.py:grade",
        f"{tmp_path}/worse.py:grade",
    ):
        with pytest.raises(
            ValueError, match=r"judge|none\.py|bad.*ModuleNotFound|worse.*SyntaxError"
        ):
            load_function(spec)


HOSTILE = [
    "{" * 10**5 + "1" + "}" * 10**5,
    "1" * 10**6,
    "9^9^9",
    "9^{9^{9^{9^9}}}",
    "10^{-99999999999}",
    "(" * 480 + "1" + ")" * 480,
    "(1," * 240 + "1" + ")" * 240,
    "-" * 990 + "1",
    "^".join(["2"] * 480),
    ",".join(["1"] * 480),
    "*".join(["9^{300}"] * 100),
    "400!*" * 150 + "1",
    "(x+1)^{9000}",
    "±1" * 400,
    "5" + "abcdefgh" * 120,
    r"\text{" * 150,
    r"\begin{pmatrix}" * 60,
    "=".join("x" * 450),
    "1" + ",000" * 240,
    r"\sin" * 240,
    r"\frac" * 190,
    "5 m" + "/s" * 400,
    "<" * 990,
    "|" * 990,
    "α_" * 450,
    "\n" * 10**6,
    r"\boxed{" * 150000,
    r"\boxed{" + "\\" * 10**6,
    "<answer>" * 150000,
    "answer is " * 100000,
    "<answer>" + "the " * 250000 + "</answer>",
    "option A is" + " " * 10**6,
    r"\boxed{5}" + "** " * 300,
]


def test_hostile_answers_take_bounded_time_and_memory(tmp_path):
    """No text raises an exception or takes too long, and same_math and same_short accept none."""
    program = """
import json, resource, sys
from eval import final_answer, pick_letter, same_math, same_short
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in json.load(open(sys.argv[1])):
    answer = final_answer(text)
    for gold in ("7", r"\\frac{1}{2}", text[:990] + "7"):
        assert not same_math(answer, gold), (text[:50], gold[:50])
        assert not same_short(text[:990], gold), (text[:50], gold[:50])
    for response in (text, "The answer is " + text, "<answer>" + text + "</answer>"):
        final_answer(response)
        pick_letter(response, ["one", "two"])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    (tmp_path / "grade.py").write_text(program)
    (tmp_path / "texts.json").write_text(json.dumps(HOSTILE))
    run = launch(f"{tmp_path}/texts.json", program=f"{tmp_path}/grade.py")
    status, out, err = end_of(run)
    assert status == 0, err
    assert int(out) < 200  # MiB


def test_no_text_raises():
    rng = random.Random(0)
    pieces = list("0123456789xyzi+-*/^_=<>(){}[]|,.;!%$ °√²½∞±≈&") + [
        r"\frac",
        r"\sqrt",
        r"\boxed{",
        r"\text{",
        r"\pi",
        r"\le",
        r"\cup",
        " or ",
        "<answer>",
        "</answer>",
        "answer is ",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\\",
        r"\log_",
        "°",
        "km",
        "not ",
        r"\{",
        r"\}",
    ]
    for _ in range(1500):
        text, other = ("".join(rng.choices(pieces, k=rng.randint(1, 25))) for _ in range(2))
        problem = Problem("p", other, other, "math")
        for grader in ("math", "short", "exact", "same"):
            problem.grader = grader
            assert grade(problem, text) in (True, False)
        pick_letter(text, ["one", other])
