"""Graders of text: tables of answers judged by hand, and texts made to take long or to break them."""
import random
import re
import subprocess
import sys

import pytest

import eval as graders
from eval import committed, copied, final_answer, pick_letter, same_math, same_short

EQUAL = [  # answer, gold
    # Greek letters, behind an index too
    (r"k_B\theta", r"\theta k_B"), (r"x_1\ell", r"\ell x_1"), (r"\sigma_x\sigma_y", r"\sigma_y\sigma_x"), (r"m_e\omega^2", r"\omega^2 m_e"),
    (r"mc_v\Delta T", r"m c_v \Delta T"), (r"v_0\Delta t+\frac12 a\Delta t^2", r"\frac12 a\Delta t^2+v_0\Delta t"),
    # other spellings
    ("x <= 3", r"x\le 3"), ("x^-3", "x^{-3}"), ("$5", "5"), ("5 = x", "5"), (r"x^{2} \cup ?", r"x^2 \cup ?"),
    # fractions, decimals, mixed numbers
    (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\tfrac12", r"\frac{1}{2}"), (r"\frac12", "1/2"), (r"\frac1{2}", r"\frac12"),
    (r"\frac{1}2", "0.5"), ("0.5", r"\frac{1}{2}"), (".5", "0.5"), ("0.50", ".5"), ("2/4", r"\frac12"), (r"\frac{9}{6}", r"\frac{3}{2}"),
    ("-1/2", r"-\frac{1}{2}"), (r"\frac{-1}{2}", r"-\frac{1}{2}"), (r"\frac{1}{-2}", "-0.5"), (r"137\frac{1}{2}", "137.5"),
    ("137 1/2", r"137 \frac{1}{2}"), (r"-2\frac12", r"-\frac52"), (r"\frac{275}{2}", r"137 \frac{1}{2}"), ("5.0", "5"), ("5.", "5"),
    ("023", "23"), ("+7", "7"), (r"\frac{1/2}{3}", r"\frac16"), (r"\frac{\frac12}{3}", "1/6"), (r"{\frac{3}{4}}", r"\frac34"),
    (r"\left(\frac34\right)", "0.75"),
    # thousands
    ("1,000", "1000"), ("1{,}000", "1000"), (r"1,\!000", "1000"), (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"90{,}900{,}909", "90,900,909"), (r"3\,000", "3000"), ("1,234.5", "1234.5"), (r"\$115,000", "115000"), ("1,000, 2,000", "2000, 1000"),
    # percent, degrees, units, money
    (r"20\%", "20"), ("20%", r"20\%"), (r"20\%", "0.2"), (r"\frac15", r"20\%"), (r"12.5\%", r"\frac18"), ("20 percent", r"20\%"),
    (r"60^\circ", "60"), (r"60^{\circ}", "60"), ("60°", r"60^\circ"), (r"60\degree", "60"), ("60 degrees", r"60^\circ"),
    (r"5\text{ cm}", "5"), ("5 cm", r"5\text{ cm}"), (r"5\mbox{ inches}", "5"), ("5 inches", r"5\text{ in}"), (r"5~\mathrm{cm}^2", "5"),
    (r"135\text{ square feet}", "135"), ("135 ft^2", r"135\text{ square feet}"), (r"135\text{ ft}^2", r"135\text{ square feet}"),
    (r"10\pi\text{ cm}", r"10\pi"), (r"\frac{3}{4}\text{ hours}", "0.75"), ("12 ways", "12"),
    ("12 different ways", "12"),
    (r"\$1.5\text{ million}", "1,500,000"),
    (r"5\text{ m}/\text{s}", "5"), (r"5\text{ m/s}", "5"), ("60 miles per hour", r"60\text{ mi/h}"), (r"\$0.50", "0.5"),
    (r"\$6", "6 dollars"), (r"\text{5}", "5"), (r"x = 5\text{ cm}", "5"),
    # spelling
    ("$5$", "5"), (r"\(5\)", "5"), ("5.", "5"), (r"\left( 3, 4 \right)", "(3,4)"), (r"2 \cdot 3", "6"), (r"2\times 10^3", "2000"),
    ("2 × 10^3", "2000"), (r"1.5\times10^{-3}", "0.0015"), ("−5", "-5"), ("2²", "4"), ("√2", r"\sqrt2"), ("2π", r"2\pi"), ("2*pi", r"2\pi"),
    (r"2 \, \pi", r"2\pi"), (r"\displaystyle\frac12", r"\frac12"),
    # roots, powers, constants, complex numbers
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{1}{\sqrt 5}", r"\frac{\sqrt{5}}{5}"), ("sqrt(12)", r"2\sqrt3"), (r"\sqrt[3]{8}", "2"),
    ("2^{10}", "1024"), ("2^10", "1024"), (r"\frac{\sqrt5-1}{2}", r"\frac{2}{1+\sqrt5}"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"2^{-1}", r"\frac12"), ("4^{1/2}", "2"), (r"\frac{\pi^2}{6}", "pi^2/6"), ("3i + 2", "2 + 3i"),
    (r"e^{2}\cdot e", "e^3"), (r"\frac{e}{\mathrm{e}}", "1"), (r"\ln 8", r"3\ln 2"),
    (r"\cos 0", "1"), (r"\sin\pi", "0"), (r"\log 1000", "3"), (r"\infty", "infinity"), (r"+\infty", r"\infty"), (r"|-5|", "5"),
    # algebra
    ("(x+2)/7", r"\frac{x+2}{7}"), (r"\frac{x}{7}+\frac27", r"\frac{x+2}{7}"), ("6p^4+5p^2-4", "(3p^2+4)(2p^2-1)"), ("(x-1)(x+1)", "x^2-1"),
    (r"7z^{96}(4z+1)", "28z^{97}+7z^{96}"), (r"\frac{x^2-1}{x-1}", "x+1"), ("2ab", "b*2a"), (r"\frac{1}{x^{-2}}", "x^2"),
    (r"x\cdot y", "yx"), (r"30x\sqrt{7x}", r"30\sqrt{7x^3}"), (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), (r"2\tan(x)", r"2 \tan x"),
    (r"\sin 2x", r"2\sin(x)\cos(x)"), (r"\frac{2a+b}{2}", r"a + \frac{b}{2}"), (r"x_1+x_2", "x_{2}+x_{1}"), (r"2\theta", r"\theta\cdot 2"),
    (r"\sin 2\theta", r"2\sin\theta\cos\theta"), ("2θ", r"2\theta"), ("λ/2", r"\frac{\lambda}{2}"), (r"\varepsilon_0", "ε_0"), (r"\theta_1x", "xθ_1"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    # functions
    (r"\sin x\cos x", r"\cos x \sin x"), (r"\sin x \cos x", r"\frac12\sin 2x"), (r"\sin^2 x", r"\sin(x)^2"), (r"\sin^2\theta", r"1-\cos^{2}\theta"),
    ("exp(-2t)", "e^{-2t}"), (r"x\ln x - x", r"x(\ln x -1)"),
    # names on one side, equations
    ("x = 5", "5"), ("5", "x=5"), ("y = 2x+3", "2x+3"), ("f(x) = x^2", "x^2"), (r"h^{-1}(x)=\frac{x+2}{7}", r"\frac{x+2}{7}"),
    (r"\theta = 60^\circ", "60"), ("x+y-1=0", "y+x-1=0"), ("0=x+y-1", "x+y-1=0"),
    (r"\frac{x+2}{7}", r"h^{-1}(x)=\frac{x+2}{7}"), ("x^2", "f(x) = x^2"), ("y=2x+3", "2x+3=y"), ("y-3=2x", "y=2x+3"),
    ("(x, y) = (1,2)", "(1,2)"), ("(3,-3,1)", "(a,b,c)=(3,-3,1)"), ("0.3", "P(A|B) = 0.3"), ("P(X>2)=0.3", "0.3"), ("2x", "y'=2x"), ("7", "f(2)=7"),
    ("x=1, y=2", "y=2, x=1"), (r"x \in [-2,7]", "[-2,7]"), ("x=0", "0"),
    # lists and sets in any order
    ("-3, 1", "1,-3"), ("1 and -3", "1,-3"), ("x=1 or x=-3", "1,-3"), (r"\{1,-3\}", "-3, 1"), (r"1\text{ and }-3", "1,-3"),
    ("{1, 2, 3}", r"\{3,2,1\}"), (r"2 \pm \sqrt3", r"2+\sqrt3, 2-\sqrt3"), (r"x=\pm 2", "2,-2"),
    (r"\frac{-1\pm\sqrt5}{2}", r"\frac{\sqrt5-1}{2}, -\frac{1+\sqrt5}{2}"), (r"1+\sqrt5, -2, 1-\sqrt5", r"\{1\pm\sqrt{5},-2\}"),
    ("0, 1, -1", r"0, \pm 1"), ("C, B", "B, C"), ("(1,2), (3,4)", "(3,4),(1,2)"), (r"\varnothing", r"\emptyset"),
    (r"\{\}", r"\emptyset"), ("1; 2", "2, 1"),
    # tuples, intervals, matrices
    ("( 9,3 )", "(9, 3)"), (r"(\frac12, 0.5)", "(1/2,1/2)"), (r"(8,\infty)\cup(-\infty,-8)", r"(-\infty,-8)\cup (8,\infty)"),
    (r"[0,\frac12)", "[0,0.5)"), (r"5, (0,1)\cup(2,3)", r"(2,3)\cup(0,1), 5"), (r"\left[ \frac12, \frac32 \right]", "[0.5,1.5]"),
    (r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix} 1&2\\3&4\\ \end{pmatrix}"),
    (r"\begin{pmatrix} 11.5/4 \\ 7/4 \end{pmatrix}", r"\begin{pmatrix} 23/8 \\ 7/4 \end{pmatrix}"), (r"\begin{pmatrix} 5 \\[4pt] 7 \end{pmatrix}", r"\begin{pmatrix} 5 \\ 7 \end{pmatrix}"),
    # text
    ("Evelyn", r"\text{Evelyn}"), (r"\text{evelyn}", r"\text{Evelyn}"), ("ellipse", r"\text{Ellipse}"), ("1:03 PM", r"\text{1:03 PM}"),
    ("(D)", r"\text{(D)}"), ("D", r"\text{(D)}"), (r"\text{D}", r"\text{(D)}"), ("Yes", r"\text{yes}"),
    ("Devon, navin", r"\text{Navin}, \text{Devon}"), (r"\overline{CD}", "CD"),
    # bases and what is not understood
    ("2516_{8}", "2516_8"), ("10_2, 11_2", "11_2, 10_2"), (r"2^{9000}", r"2^{9000}"), (r"\sum_{k=1}^n  k", r"\sum_{k=1}^n k"),
    ("3 : 4", "3:4"), (r"x \ge 3", r"x\geq 3"), ("x<5", "x < 5"),
]
DIFFERENT = [
    (r"(\alpha_2,\alpha_1)=(3,4)", "(3,4)"),
    (r"\pi + 10^{-12}", r"\pi"), (r"\pm 1 \pm 2", "-1 + 2"), ("6 = x", "5"),
    ("0.333", r"\frac13"), ("0.33333333", r"\frac13"), ("1.414", r"\sqrt2"), ("3.14", r"\pi"), (r"\frac{22}{7}", r"\pi"), ("0.167", "1/6"),
    ("2", "1/2"), (r"\frac21", r"\frac12"), ("-5", "5"), ("5", "-5"), ("6", "5"), ("5.01", "5"), ("50", "5"), ("1000", "100"),
    (r"2\frac13", r"\frac23"), ("", "5"), (" ", "5"), ("", ""), ("5", ""), ("?", "5"), ("$", ""), ("1/0", "5"), (r"\sqrt[i]{2}", "5"),
    ("5)", "5"), ("(5", "5"), ("the answer", "5"), ("55", "5 5"), ("5 5", "25"), ("12", "1, 2"),
    ("1000000000001", "1000000000000"), (r"10^{20}+1", "10^{20}"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("2^{64}", "2^{64}-1"),
    ("0", r"2^{-200}"), ("11", "11_2"), ("11_2", "11"), ("11_3", "11_2"), ("3", "11_2"), ("112", "11_2"), ("2516", "2516_8"),
    ("x_1", "x_2"), ("x", "x_1"), ("20", "0.2"), (r"0.2\%", r"20\%"), (r"20\%", "2"), (r"5\text{ cm}", r"5\text{ m}"),
    ("5 miles", r"5\text{ km}"), (r"5\text{ cm}", r"5\text{ cm}^2"), ("50 cents", "50 dollars"), ("3 hours", "3 minutes"),
    ("5 million", "5"), ("1.5 million", "1.5 billion"), ("3 days", "3 weeks"), ("5 nanometers", "5 meters"), (r"5\text{ kilojoules}", "5 joules"),
    ("20,000 gain", "20,000 loss"), ("10% increase", "10% decrease"), ("5 miles north", "5 miles south"), ("2 dozen", "2"), ("3 weeks", "3 hours"), ("3 apples", "3 pears"), (r"5\text{ m}^2/\text{s}^2", r"5\text{ m}^2/\text{s}"),
    ("6 cm", r"5\text{ cm}"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"), ("[1,2)", "[1,2]"), ("[2,1)", "[1,2)"),
    ("1,2", "(1,2)"), ("(1,2)", "1,2"), ("(1,2,3)", "(1,2)"), ("1", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("[-36,104]", "[-36104]"),
    ("-36,104", "[-36,104]"), ("(-36,104)", "[-36,104]"), ("((1,2),3)", "(1,(2,3))"), (r"(-\infty,-8)", r"(-\infty,-8)\cup(8,\infty)"),
    (r"(-\infty,-8]\cup(8,\infty)", r"(-\infty,-8)\cup(8,\infty)"), (r"\infty", r"-\infty"), ("5", r"\infty"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("1", "1,-3"), ("1,-3,5", "1,-3"), ("1, 3", "1,-3"),
    ("1,1", "1,-3"), ("5 or 6", "5"), ("5, 6", "6"), (r"\pm 5", "5"), ("5", r"\pm 5"), (r"2\pm\sqrt5", r"2\pm\sqrt3"),
    (r"\{1,2\},\{3,4\}", r"\{1,3\},\{2,4\}"), (r"\{\}", "0"), ("0", r"\emptyset"), ("x=3, y=2", "x=2, y=3"), ("x=6", "5"),
    ("y=2x+4", "y=2x+3"), ("y=2x+3", "y=3x+2"), ("x+y=5", "x-y=5"), ("x+y-69=0", "0"), ("0", "x+y-69=0"), ("x=5, 6", "5"),
    ("3x+4y+14=0", "3*x-1*y+13=0"), ("n=1,2,3", "n=2,3,4"), ("2", "2b"), ("2b", "2"), ("2B", "2b"), ("2b", "2c"), ("x", "|x|"),
    (r"\sqrt{x^2}+1", "|x|"), ("x^2", "x^3"), ("x+1", "x-1"), (r"\frac{x}{7}+2", r"\frac{x+2}{7}"), (r"x^{12}", "x^1 2"),
    (r"2\arctan(1)", r"\arctan(2)"), (r"\sinh(2x)", r"2\sinh x"), (r"\cot(2x)", r"2\cot x"), (r"\sin^2 x", r"\sin x^2"), (r"\sin^{-1} x", r"1/\sin x"),
    ("(x,y)=(1,2)", "(2,1)"), ("(1,2)=(1,2)", "(1,2)"), (r"\sin x", r"\cos x"), (r"\sin 2x", r"2\sin x"), (r"\sin x", "x"), (r"\sin 2\theta", r"\theta\sin 2"), ("2θ", r"2\phi"), (r"1+\frac{1}{\mathrm{e}}", r"1-\frac{1}{\mathrm{e}}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\binom{5}{2}", r"\binom{2}{5}"), (r"\sqrt{2}", r"\sqrt{3}"), (r"\sqrt[3]{2}", r"\sqrt{2}"),
    ("-15-8i", "-15+8i"), ("7z^{97}(4z+1)", "7z^{96}(4z+1)"), (r"\frac{2^{905}+1}{3\cdot2^{906}}", r"\frac{1}{3\cdot2^{906}}"),
    (r"2^{9000}", r"2^{9001}"), ("east", "seat"), ("Navin", r"\text{Devon}"), ("man bites dog", "dog bites man"),
    ("1:04 PM", r"\text{1:03 PM}"), ("12:00", "1:00"), ("B", r"\text{(D)}"), (r"\text{not even}", r"\text{even}"), ("x>5", "x<5"),
    ("x<5", r"x\le 5"), (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"), ("3:4", "4:3"),
]

ACCEPTED = r"""
x \geq 3 ¦ x >= 3
x >= 3 ¦ [3,\infty)
x \geq 3 ¦ 3 \leq x
1<x<2 ¦ (1,2)
1 < x \leq 2 ¦ (1,2]
2>x>1 ¦ (1,2)
x<-8 \text{ or } x>8 ¦ (-\infty,-8)\cup(8,\infty)
x<-8 or x>8 ¦ (-\infty,-8)\cup(8,\infty)
2x + 4y = 6 ¦ x + 2y = 3
y = 2x+3 ¦ 2x - y + 3 = 0
\left(\begin{array}{c} 1 \\ 2 \end{array}\right) ¦ \begin{pmatrix}1\\2\end{pmatrix}
\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right] ¦ \begin{pmatrix}1&2\\3&4\end{pmatrix}
x=2,4 ¦ x=3\pm1
x = 3\pm 1 ¦ 2,4
3 \pm 1 ¦ 2, 4
\log_2 8 ¦ 3
\log_{10} 100 ¦ 2
\log_2 100 ¦ \frac{\log 100}{\log 2}
5! ¦ 120
\sin 30^\circ ¦ \frac12
\sin(30^\circ) ¦ 0.5
\cos 60° ¦ 1/2
\tan 45^{\circ} ¦ 1
5000\text{ m} ¦ 5\text{ km}
5\text{ km} ¦ 5000\text{ m}
100\text{ cm} ¦ 1\text{ m}
1\text{ hour} ¦ 60\text{ minutes}
90\text{ min} ¦ 1.5\text{ hours}
36 \text{ km/h} ¦ 10 \text{ m/s}
36\text{ in} ¦ 1\text{ yard}
50\text{ cents} ¦ \$0.50
5 cm^2 ¦ 5\text{ square centimeters}
1 m^2 ¦ 10000\text{ cm}^2
\text{five} ¦ 5
five ¦ 5
\frac{12}{7} \approx 1.71 ¦ \frac{12}{7}
\frac{12}{7} \approx 1.714 ¦ 12/7
\sqrt{2} \approx 1.414 ¦ \sqrt{2}
x = \sqrt{2} \approx 1.41 ¦ \sqrt{2}
\pi \approx 3.14 ¦ \pi
\frac{n!}{(n-1)!} ¦ n
(-1)^n ¦ (-1)^{n+2}
2^{n+1} ¦ 2 \cdot 2^n
\sqrt{x^2-1} ¦ \sqrt{(x-1)(x+1)}
\sqrt{1-x^2} ¦ \sqrt{(1-x)(1+x)}
\sqrt{x-5} ¦ \sqrt{-5+x}
e^{x+1} ¦ e \cdot e^x
\ln(x^2) ¦ 2\ln x
\ln(ab) ¦ \ln a+\ln b
x^{1/2} ¦ \sqrt{x}
x^{-2} ¦ \frac{1}{x^2}
(\sqrt{x})^2 ¦ x
\frac{1}{2}gt^2 ¦ \frac{gt^2}{2}
\sqrt[3]{16} ¦ 2\sqrt[3]{2}
\sqrt{5+2\sqrt6} ¦ \sqrt2+\sqrt3
\cos 36^\circ ¦ \frac{1+\sqrt5}{4}
|x-3| ¦ \left|3-x\right|
\langle 1,2\rangle ¦ \langle 1, 2 \rangle
\{1,2,3\} ¦ \{3,2,1\}
1\text{ and }2 ¦ 2, 1
(1,2)\text{ and }(3,4) ¦ (3,4),(1,2)
x\in(1,2) ¦ (1,2)
(a,b)=(1,2) ¦ (1,2)
a=1, b=2 ¦ b=2, a=1
25^\circ C ¦ 25\text{ °C}
5\text{ kg}\cdot\text{m/s}^2 ¦ 5\text{ N}
1{,}234{,}567 ¦ 1234567
$1,234 ¦ \$1234
\$5 ¦ 5 dollars
5\% ¦ 0.05
12 \text{ ways} ¦ 12
\text{Yes} ¦ yes
\mathrm{CO_2} ¦ \text{CO}_2
\angle ABC = 60^\circ ¦ 60
AB = 5 ¦ 5
P(A) = \frac13 ¦ \frac13
5 m ¦ 5\text{ m}
\text{No solution} ¦ no solution
2x^2+3x+1 ¦ (2x+1)(x+1)
\frac{3}{x-1}-\frac{1}{x+1} ¦ \frac{2x+4}{x^2-1}
(x,y)=(2,3) ¦ (2,3)
x = 2\text{ or }x=3 ¦ 2,3
\pm\sqrt{2} ¦ \sqrt{2},-\sqrt{2}
a_1 + a_2 ¦ a_{2}+a_{1}
3.50 ¦ 3.5
1.5 \times 10^3 ¦ 1500
\boldsymbol{5} ¦ 5
\mathbf{5} ¦ 5
{5} ¦ 5
\ 5\  ¦ 5
-\frac{\sqrt3}{3} ¦ -\frac{1}{\sqrt3}
\frac{\sqrt{3}}{2} ¦ \sin 60^\circ
\arctan 1 ¦ \frac{\pi}{4}
\frac{2}{3}\pi ¦ \frac{2\pi}{3}
2\pi/3 ¦ \frac{2\pi}{3}
(3\pi)/4 ¦ \frac{3\pi}{4}
\frac{5\pi}{4}\text{ radians} ¦ \frac{5\pi}{4}
y=\frac{1}{2}x+3 ¦ y=\frac{x}{2}+3
y = x/2 + 3 ¦ y=\frac{x}{2}+3
(x+1)^2+(y-2)^2=9 ¦ (x+1)^2+(y-2)^2=3^2
\text{10 cm} ¦ 10
5 m^2 s ¦ 5\text{ m}^2\text{ s}
x+2y-3z=0 ¦ 3z=x+2y
6\sqrt{2} \text{ units} ¦ 6\sqrt2
t = 4\text{ seconds} ¦ 4
(x_1, x_2) ¦ (x_{1},x_{2})
x_{2}x_{1} ¦ x_1x_2
x_1x_2+1 ¦ 1+x_{1} x_{2}
\log_{2}8 ¦ 3
\sin{30^\circ} ¦ \frac12
\cfrac{3}{4} ¦ \frac34
\psi = 5 ¦ 5
5~\text{cm} ¦ 5\text{ cm}
x \neq 3 ¦ x \ne 3
|x-50| ¦ |50-x|"""
ACCEPTED_SHORT = r"""
CO2 ¦ CO_2
CO2 ¦ CO₂
\text{CO}_2 ¦ CO2
H_2O ¦ H2O
5000 m ¦ 5 km
5 km ¦ 5000 m
5.0 km ¦ 5.01 km
5010 m ¦ 5.0 km
9.8 m/s² ¦ 9.81 m/s^2
9.8 m s^-2 ¦ 9.81 m/s^2
9.8 m/s/s ¦ 9.81 m/s^2
three ¦ 3
3 ¦ three
Three ¦ 3
72 km/h ¦ 20 m/s
72 km/h ¦ 20.0 m/s
0.5 L ¦ 500 mL
25 °C ¦ 25.0 degrees Celsius
6.02 x 10^23 ¦ 6.02e23
1.2 MPa ¦ 1200000 Pa
1,200,000 Pa ¦ 1.2 MPa
2.5 hours ¦ 150 minutes
increase in demand ¦ An increase in demand
Increase In Demand ¦ increase in demand
$1,234.50 ¦ 1234.5
The Hague ¦ the hague
x^2 + 1 ¦ 1 + x^2
mgh ¦ mgh
kg·m/s^2 ¦ kg m/s^2
10 N ¦ 10 kg m/s^2
0.25 ¦ 25%
Paris. ¦ Paris
"Paris" ¦ Paris
A ¦ A
2.50 eV ¦ 4.005e-19 J
9.8 meters per second squared ¦ 9.81 m/s^2
8.314 J/(mol·K) ¦ 8.314 J/mol K
8.314 J mol^{-1} K^{-1} ¦ 8.314 J/mol K
4.18 J/g°C ¦ 4.18 J/(g °C)"""

FOUND_WRONG = r"""
{1}{2} ¦ 2 ‖ 1{0} ¦ 0 ‖ 5{6} ¦ 30 ‖ {2}\frac13 ¦ \frac23 ‖ [5][6] ¦ 30 ‖ {5}{6} ¦ 30 ‖ x₁2 ¦ x_{12} ‖ 10\$0 ¦ 100 ‖ no = 5 ¦ 5 ‖ NO = 5 ¦ 5
5 = no ¦ 5 ‖ NONE = 5 ¦ 5 ‖ lt = 5 ¦ 5 ‖ ne = 5 ¦ 5 ‖ P(not 5)=5 ¦ 5 ‖ x(wrong)=5 ¦ 5 ‖ LOSS = 500 ¦ 500 ‖ x\in 5 ¦ 5 ‖ (x,y)=5 ¦ 5
x_{wrong} = 5 ¦ 5 ‖ No=5 ¦ 5 ‖ 12.566370614r^2 ¦ 4\pi r^2 ‖ 22.360679775x ¦ \sqrt{500}x
\frac{14142135623730951}{10000000000000000}x ¦ \sqrt2 x ‖ 12.566370614x+y=0 ¦ 4\pi x+y=0 ‖ 3.1415926536(x+1) ¦ \pi x+\pi ‖ 5 Mmol ¦ 5 mmol
5 Mohm ¦ 5 mohm ‖ 5 Mbar ¦ 5 mbar ‖ 5 Mbit ¦ 5 mbit ‖ 5 Mcal ¦ 5 mcal ‖ 5 Mohms ¦ 0.005 ohm ‖ 5 MBits ¦ 0.005 bit ‖ 5 Pmol ¦ 5 pmol
|2+i|^2 ¦ (2+i)^2 ‖ |a+bi|^2 ¦ (a+bi)^2 ‖ |e^{i\theta}| ¦ e^{i\theta} ‖ \sqrt{(3+4i)^2} ¦ |3+4i| ‖ ((3+4i)^2)^{1/2} ¦ 3+4i
\sqrt{(a+bi)^2} ¦ a+bi ‖ \frac{\pi}3^\circ ¦ \frac\pi3 ‖ \frac\pi3\text{ degrees} ¦ \frac\pi3 ‖ \pi° ¦ \pi ‖ 2\pi deg ¦ 2\pi ‖ 5\;280 ¦ 5280
x^2-5x+6 ¦ |x^2-5x+6| ‖ x^2-7x+12 ¦ |x^2-7x+12| ‖ 2x^2-7x+6 ¦ |2x^2-7x+6| ‖ |x-3|+|x-4| ¦ |2x-7| ‖ \frac{|x-3|}{x-3} ¦ \frac{|x-4|}{x-4}
50000-x ¦ |x-50000| ‖ e^{|n|} ¦ e^n ‖ |u|e^{-u^2} ¦ ue^{-u^2} ‖ V\sqrt{V+1} ¦ \sqrt{V^3+V^2} ‖ \sqrt{x}^2 ¦ |x|
x\frac{\sqrt x}{\sqrt x} ¦ |x| ‖ 2^{\log_2 x} ¦ |x| ‖ e^{\ln x} ¦ |x| ‖ \sqrt{x-50}\sqrt{x-50} ¦ |x-50| ‖ \ln x+C ¦ \ln|x|+C
-\ln(\cos x) ¦ -\ln|\cos x| ‖ x+y ¦ |x+y| ‖ \log 999999999 ¦ 9 ‖ \log_2 999999999 ¦ \log_2 1000000000 ‖ \pi x(1+10^{-11}) ¦ \pi x
\sqrt{x^2+\frac1{10^{12}}} ¦ |x| ‖ \sqrt{9.8696044} ¦ \pi ‖ \sqrt[3]{31.00627668} ¦ \pi ‖ \sqrt[9]{22.627417} ¦ \sqrt2 ‖ \sin(1.5707963) ¦ 1
\sqrt{x^2-4x+4} ¦ 2-x ‖ T(n)=4T(n/4)+n ¦ T(n)=2T(n/2)+n ‖ a(n)=2a(n-1)-a(1) ¦ a(n)=a(n-1)+a(n-2) ‖ a(n)=2a(n-1) ¦ a(n)=2an-2a ‖ 2V(X) ¦ V(2X)
h(x)+h(y) ¦ h(x+y) ‖ \phi(x+y) ¦ \phi(x)+\phi(y) ‖ F(b)-F(a) ¦ F(b-a) ‖ f^2(3) ¦ 3f^2 ‖ f^{-1}(x) ¦ \frac xf ‖ f[2] ¦ 2f ‖ u(2t) ¦ 2u(t)
A^{-1}B^{-1} ¦ B^{-1}A^{-1} ‖ Q^{-1} A Q ¦ A ‖ X^T Y ¦ Y X^T ‖ \sigma\tau ¦ \tau\sigma ‖ R Y G ¦ G Y R ‖ A B C ¦ C B A ‖ A-C-B-D ¦ A-B-C-D
v\times u ¦ u\times v ‖ v × u ¦ u × v ‖ \mathbf{v}\times\mathbf{u} ¦ \mathbf{u}\times\mathbf{v}
\mathbf{v}\times\mathbf{u} ¦ \mathbf{u}\cdot\mathbf{v} ‖ \mathbf v\times\mathbf u ¦ \mathbf u\cdot\mathbf v
\mathbf{A}^{-1}\mathbf{B} ¦ \mathbf{B}\mathbf{A}^{-1} ‖ T(\frac n4) ¦ \frac14T(n)"""  # what a red team found: nothing of this pays in either direction
FOUND_RIGHT = r"""
\frac{-1+i\sqrt{3}}{2} ¦ -\frac12+\frac{\sqrt3}{2}i ‖ 1+2i\sqrt{3} ¦ 1+2\sqrt{3}i ‖ e^{i\pi/3}+1 ¦ 1+e^{\frac{i\pi}{3}}
2[(x+1)^2+3] ¦ 2(x+1)^2+6 ‖ 3 Days ¦ 3 days ‖ 5 Meters ¦ 5 m ‖ AB = 5 ¦ 5 ‖ (r,\theta)=(2,\pi/3) ¦ (2,\pi/3) ‖ v_f = 5 ¦ 5
P(A\cap B) = 0.3 ¦ 0.3 ‖ P(X>2)=0.3 ¦ 0.3 ‖ A(x,y)=3 ¦ 3 ‖ \angle ABC = 60^\circ ¦ 60 ‖ \triangle ABC = 60 ¦ 60 ‖ x\in\{1,2\} ¦ 1,2 ‖ xy=6 ¦ 6
60^\circ ¦ 60 ‖ 4\pi\times10^{-7} ¦ 4\times 10^{-7}\pi ‖ \frac{\pi x^{12}}{12} ¦ \pi x^{12}/12 ‖ \sqrt{2}x^{10} ¦ x^{10}\sqrt2
\frac{\sqrt{x^2-9}}{x} ¦ \sqrt{x^2-9}/x ‖ {5}\text{ cm} ¦ 5 ‖ 1{,}000{,}000 ¦ 1000000 ‖ 12\,345 ¦ 12345 ‖ \$1{,}234.50 ¦ 1234.5
x(x+1) ¦ x^2+x ‖ a(b+c) ¦ ab+ac ‖ \frac{n(n+1)}{2} ¦ \frac{n^2+n}2 ‖ F d ¦ d F ‖ 2\theta ¦ \theta\cdot 2 ‖ x\cdot y ¦ yx ‖ 2 × 3 ¦ 6
2 × 10^3 ¦ 2000 ‖ \frac12\times b\times h ¦ \frac12 bh ‖ h(b_1+b_2)/2 ¦ \frac{h(b_1+b_2)}{2} ‖ f(x)=x^2+1 ¦ 1+x^2 ‖ y=a(x-h)^2+k ¦ y=k+a(x-h)^2
kx^{-1} ¦ \frac kx ‖ \sin(x)\cos(x) ¦ \cos x\sin x ‖ \eta x ¦ x\eta ‖ 2V+V ¦ 3V ‖ \sqrt{2.25} ¦ 1.5 ‖ \log_2 1000000 ¦ 6\log_2 10
2\times\pi ¦ 2\pi ‖ \frac{\sin(x)}{x(x+1)} ¦ \frac{\sin x}{x^2+x}"""
FOUND_WRONG_SHORT = r"""
hepatitis a ¦ hepatitis ‖ vitamin ¦ vitamin a ‖ type a ¦ type ‖ hepatitis ¦ hepatitis a ‖ vitamin a deficiency ¦ vitamin deficiency"""


def rows(table: str) -> list[tuple]:
    return [tuple(line.split(" ¦ ")) for line in re.split("\n| ‖ ", table.strip())]


@pytest.mark.parametrize("answer, gold", rows(FOUND_WRONG))
def test_what_a_red_team_found(answer, gold):
    assert not same_math(answer, gold) and not same_math(gold, answer)


@pytest.mark.parametrize("answer, gold", rows(FOUND_WRONG_SHORT))
def test_what_a_red_team_found_among_short_answers(answer, gold):
    assert not same_short(answer, gold)


@pytest.mark.parametrize("answer, gold", rows(ACCEPTED) + rows(FOUND_RIGHT))
def test_accepted(answer, gold):
    assert same_math(answer, gold) and same_math(gold, answer)


@pytest.mark.parametrize("answer, gold", EQUAL)
def test_equal_mathematics(answer, gold):
    assert same_math(answer, gold)
    assert same_math(f" {gold}. ", gold) and same_math(final_answer(rf"So it is \boxed{{{answer}}}, as was asked."), gold)


@pytest.mark.parametrize("answer, gold", DIFFERENT)
def test_different_mathematics(answer, gold):
    assert not same_math(answer, gold)


def test_every_gold_equals_itself_alone_and_in_a_list():
    """Whatever the table holds, in any order; and an answer that is right stays right in other spaces."""
    for gold in {g for _, g in EQUAL if g}:
        assert same_math(gold, gold) and same_math(final_answer(rf"\boxed{{{gold}}}"), gold)
    values = [g for _, g in EQUAL if g.isdecimal() and len(g) < 3]
    shuffled = random.Random(0).sample(values, len(values))
    assert same_math(", ".join(shuffled), ",".join(values))
    assert not same_math(", ".join(shuffled[1:] + ["777"]), ",".join(values))


def test_polynomials_and_their_expansions():
    """(x - r1)(x - r2)(x - r3) against its coefficients, worked out here in integers; and against those of one other root."""
    rng = random.Random(1)
    for _ in range(30):
        roots = [rng.randint(-9, 9) for _ in range(3)]

        def expanded(r):
            s1, s2, s3 = sum(r), r[0] * r[1] + r[0] * r[2] + r[1] * r[2], r[0] * r[1] * r[2]
            return f"x^3 {-s1:+d}x^2 {s2:+d}x {-s3:+d}"

        product = "".join(f"(x {-r:+d})" for r in rng.sample(roots, 3))
        assert same_math(product, expanded(roots))
        assert not same_math(product, expanded([roots[0], roots[1], roots[2] + 1]))


def test_numbers_beyond_the_limit_are_text():
    assert same_math("2*2^{989}", "2^{990}") and not same_math("2^9000*2^9000", "2^18000") and same_math("9" * 400, "9" * 400)
    assert same_math("2^{5000}", " 2^{5000}") and not same_math("2^{5000}", "2^{4999}*2")
    assert same_math("x" * 1001, "x" * 1001 + " ")


# A response to what it commits to; None: neither a box nor a tag
COMMITTED = [
    (r"so \boxed{5}", "5"), (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."), (r"\fbox{7}", "7"), (r"\boxed {7}", "7"), (r"our answer is $\boxed 2$.", "2"), (r"\boxed{\boxed{3}}", "{3}"),
    ("<answer> 5 </answer>", "5"), ("<answer>1</answer> no, <answer>2</answer>", "2"), (r"<answer>\boxed{5}</answer>", "{5}"),
    (r"<answer>It is \boxed{5}.</answer>", "It is {5}."), (r"\boxed{6} <answer>5</answer>", "5"), (r"<answer>5</answer> \boxed{6}", "6"),
    ("<answer>5", ""), (r"\boxed{5} and then \boxed{6", ""), (r"\boxed{5} <answer>6", ""), (r"\boxed{}", ""), ("<answer></answer>", ""),
    ("5", None), ("", None), (r"Write it in \boxed and stop. \boxed{4}", "4"), (r"Put it in \boxed", None),
    ("<answer>a\nb</answer>", "a\nb"), (r"\boxed{a\\}", r"a\\"),
    *((rf"\boxed{{5}}{more}", "") for more in ("^2", "/6", "!", "6", "+1", r"\cdot 6", r"\times 10^3", r"\pi", "*2", ".5", "{,}000", "$/6", "; 6", r" \text{ or } 6", ", 6", " or $6$", " and -6")),
    *((into.format(r"\boxed{5}"), "") for into in (
        "-{}", "- ${}$", "2{}", r"2\,{}", r"\sqrt{{{}}}", r"\frac{{{}}}5", r"x\neq{}", r"\ln {}", "not {}", "({})^2", "|{}|", "5:{}", "{}x+3", "{} - 3", r"{}\ln 2",
        "{}(x+1)", "{}i", "{} million", r"${}$ \text{{ million}}", "{}=13", "{} x", r"{}\pm 1", "-\n{}",
        "5 ---\n{}", "**not** {}", "**-** {}", "2**{}", "**{}** million", r"**{}**\text{{ million}}", "2 **{}**", "-**{}**", "**{}** or 6", "${}$ times $3$", "{} i", "**minus** ${}$", "${}$\n- 3", "x =\n- ${}$", "- **{}** million", "**{}** **or 6**", "x = - **{}**")),
    *((into.format(r"\boxed{5}"), "5") for into in (
        "So $x={}$.", r"\[ {} \]", "**{}**", r"\text{{So }}{}", r"\therefore {}", "{} units", r"{} \mathrm{{~cm}}", r"4!={} \approx 5.0", "Step 3: {} (since x>3)", "2\n{}",
        r"{}\pmod{{13}}", "<b>{}</b>", r"\quad{}\\",
        "is **${}$**.", "The answer is *{}*", "So it is:\n\n---\n\n$${}$$", "**Final Answer**\n{}", "**Final Answer**\n\n$${}$$", "**Step 5**\n\n$$\n{}\n$$", "**(c)**\n{}", "it is **exactly** ${}$",  # as models write
        "**${}$** N", "**Answer: ${}$** N", "The answer is **${}$** m.", "{}**Explanation:** as", "So the answer is:\n- **${}$**",
        "*So* {}", r"$\longrightarrow {}$", r"$\Large{}$", "$$\n{}\n$$\n\n- $x=3$ is excluded.", "$${}$$\n\n* **Check**: it works", "${}$ m.",
        "${}$\n\nI've verified this.", "{}\n\n(i) as asked", "${}$ m/s", "So it is crossed ${}$ times.", r"${}$ $\checkmark$", "${}$ (≈ 5.0)", r"$\Leftrightarrow {}$")), (r"\boxed{-\boxed{12}}", "-{12}"), (r"\boxed{not \boxed{12}}", "not {12}"),
    *((rf"$\boxed{{5}}${more}", "5") for more in (".", ", as asked", " units", r"\text{ cm}", " or so", "\n\n6")),
    *((f"So x is {b}$\\boxed{{5}}${b}{between}{b}$\\boxed{{6}}${b}.", "5, 6") for b in ("", "**", "***") for between in (" or ", " and ", ", ")),
    (r"\boxed{5}, \boxed{6}", "5, 6"), (r"$x=\boxed{5}$ or $x = \boxed{6}$", "5, 6"), (r"\boxed{5}, then \boxed{6}", "6"),
]


@pytest.mark.parametrize("response, found", COMMITTED)
def test_committed(response, found):
    assert committed(response) == found


def test_final_answer_without_box_or_tag():
    assert final_answer("Adding up.\nThe answer is **12**") == "12"
    assert final_answer("First answer: 3\nFinal answer: 4\nDone.") == "4"
    assert final_answer(" 42 \n") == "42" and final_answer("") == ""
    assert same_math(final_answer("**Answer:** $\\frac12$."), "0.5")
    assert final_answer(r"It is $\boxed{36}\%$.") == final_answer(r"It is $\boxed{36}^\circ$.") == "36"


@pytest.mark.parametrize("answer, gold", [("e^{0.25}", r"e^{\frac14}"), (r"\sqrt[5]{e}", "e^{1/5}"), ("2e^{-0.1}", r"2e^{-\frac{1}{10}}"),
                                          (r"\sqrt[4]{\pi}", r"\pi^{1/4}"), (r"\sqrt[12]{2}", "2^{1/12}")])
def test_high_roots_of_constants_and_of_small_numbers(answer, gold):
    assert same_math(answer, gold)


def test_an_answer_that_is_taken_back_is_none():
    for after in (" But it may be 6.", " It could also be 6.", " Perhaps it is 6.", "\nWait, 6.", "\nAlternatively, 6", " However, 6 fits.",
                  " Or 6.", " And 6.", " No, 6.", " Not quite.", " Actually, 6.", " Maybe it is 6.", " It may be 6.", " It might be 6."):
        assert not same_math(final_answer(f"The answer is 5.{after}"), "5"), after
    for before in ("It is not true that", "Never say that", "If x is 3,", "I do not know whether", "Unless x is 3,", "It is wrong that",
                   "It is false that", "I doubt that", "It is unlikely that", "It isn't so that"):
        assert not same_math(final_answer(f"{before} the answer is 5."), "5"), before
    assert not same_math(final_answer("The answer is 5 because I think so. No, it is 6."), "5")
    for after in (" because 2 + 3 = 5. And we are done.", " because 2+3=5. No other value works.", " because 2 + 3 = 5.", ", since 2 + 3 = 5.", ".\nThat is all.", ". So ends it."):
        assert final_answer(f"Final answer:\n5{after}") == final_answer(f"It is not 6. The answer is 5{after}") == "5", after


@pytest.mark.parametrize("answer, question, gold, found", [
    (r"\sqrt{192}", r"Simplify $\sqrt{192}$.", r"8\sqrt3", True),
    (r"\dfrac{27}{30}", r"Reduce $\frac{27}{30}$ to lowest terms.", r"\frac{9}{10}", True),
    (r"(x + 1)(x+2)", "Expand $(x+1) (x+2)$.", "x^2+3x+2", True),
    *((spelling.format(r"\sqrt{192}"), r"Simplify $\sqrt{192}$.", r"8\sqrt3", True)
      for spelling in (r"\,{}", r"{}\!", r"\displaystyle {}", "({})", r"\left({}\right)", "x = {}", "{} + 0", r"1 \cdot {}", r"{}\cdot 1", "0+{}",
                       r"{}\text{{ units}}", "{}.", "{}/1", "{}^1", "{}+0.0", "0.0+{}", "+{}", r"\frac{{{}}}{{1}}", r"1.0\cdot{}", "-(-{})")),
    ("27/30", r"Reduce $\frac{27}{30}$ to lowest terms.", r"\frac{9}{10}", True), ("(x-1)(x+1)", "Expand $(x-1)(x+1)$.", "x^2-1", True),
    (r"\frac{1}{2}", "What is half of 2?", "0.5", False), (r"1+\frac{\sqrt3}{2}", r"Add 1 to $\frac{\sqrt3}{2}$.", r"\frac{2+\sqrt3}{2}", False),
    (r"50^\circ.", r"Find $x$, where $\tan x = \cos 50^{\circ}$.", r"50^\circ", False),
    (r"\frac1{2\sqrt7}", r"Rationalize the denominator: $\frac1{2\sqrt7}$.", r"\frac{\sqrt7}{14}", True), (r"\sqrt8", r"Simplify $\sqrt8$.", r"2\sqrt2", True),
    (r"\frac{1}{\sqrt{2}-1}", r"Rationalize the denominator: $\frac{1}{\sqrt{2}-1}$.", r"\sqrt{2}+1", True),
    ("x^2+y^2+4x-6y=12", "Write $x^2+y^2+4x-6y=12$ in standard form.", "(x+2)^2+(y-3)^2=25", True),
    ("3x+4y=12", "Find the slope-intercept form of $3x+4y=12$.", r"y=-\frac34x+3", True), ("3x+4y=12", "Is $3x+4y=12$ or $3x+4y=13$ a line through (0,3)?", "3x+4y=12", False),
    ("y = 2x+3", "Solve $y = 2x+3$ for $x$.", "y=2x+3", False),
    (r"8\sqrt{3}", r"Simplify $\sqrt{192}$.", r"8\sqrt3", False),
    *((formula, f"Simplify ${formula}$.", gold, True) for formula, gold in (
        (r"2\sin\theta\cos\theta", r"\sin 2\theta"), (r"\sin\theta\cos\theta", r"\frac12\sin2\theta"), (r"\cos\theta\tan\theta", r"\sin\theta"))),
    (r"\frac{2}{3}", r"Which is larger, $\frac{2}{3}$ or $\frac{3}{5}$?", r"\frac23", False),
    ("2", "What is $2+2-2$?", "2", False),
    ("Peter", "Is Peter or Paul older?", "Peter", False),
])
def test_a_copied_formula(answer, question, gold, found):
    """The letters of the question, but for spaces and sizes, and not those of the gold answer."""
    assert copied(answer, question, gold) is found


CHOICES = ["mitochondria", "The nucleus.", "a ribosome", "All of the above"]
FORMS = (
    "<answer>{}</answer>", r"\boxed{{{}}}", "Answer: ({})",
    "the answer is **{}**", r"\boxed{{\text{{{}}}}}", "{}.", "{}", "({})", "option {}",
    "<answer>Option {}.</answer>", "<answer>({})</answer>", r"$\boxed{{\mathrm{{({})}}}}$", "ANSWER: {}", "**Answer:** {}", "Answer:\n{}",
    "The correct option is ({}).", "All of it considered, the best choice is {}, since a cell needs it.", "Long thoughts.\n\n**{}**",
    "A cell has these. So option {} is correct.", "The answer is {} because A and C say less.", "Therefore, the final answer is: {}",
    "I would say\n\n{}", "Therefore, {}", "So {}.", "Is it A or B? Let us see.\nAnswer: {}")
LETTERS = [
    *((form.format(letter), letter) for form in FORMS for letter in "ABCD"), ("(A) mitochondria", "A"), ("B. The nucleus", "B"),
    ("C) a ribosome", "C"), ("D: all of the above", "D"), ("Answer: **C. ribosome**", "C"), ("<answer>(B) nucleus</answer>", "B"),
    ("<answer>b</answer>", "B"), ("<answer>(c)</answer>", "C"), ("A mitochondria", "A"), ("<answer>mitochondria</answer>", "A"),
    ("<answer>Nucleus</answer>", "B"), ("<answer>the nucleus</answer>", "B"), ("Answer: a ribosome.", "C"),
    (r"\boxed{\text{All of the above}}", "D"), ("All of the above", "D"), ("All of these are wrong.", None),
    ("A ribosome makes proteins.", None), ("A cell. Because it is alive.", None), ("Deoxyribose", None), ("<answer>Both</answer>", None),
    ("<answer>A.S. Neill</answer>", None), ("The answer is a bird.", None), ("Answer: A bird in the hand", None),
    ("<answer>Chromatin</answer>", None), ("I am not sure.", None), ("", None), ("<answer></answer>", None), ("<answer>A", None),
    ("<answer>E</answer>", None), ("<answer>5</answer>", None), ("The answer is not A.", None), ("Answer seems hard; Bad luck", None),
    ("A. no\nB. no\nC. yes\nD. no", None), ("I would pick B, a safe bet", None), ("A or B", None), ("<answer>A or B</answer>", None),
    ("<answer>A, B</answer>", None), ("<answer>A/B</answer>", None), ("<answer>(A) and (C)</answer>", None),
    ("<answer>A. mitochondria or B. the nucleus</answer>", None), ("The answer is A.\nThe answer is B.", None),
    ("The answer is A. No, the answer is B.", None), ("The answer is B because I think so. No, it is C.\nDone.", None),
    ("The answer is B because it has a wall. No other option fits.\nDone.", "B"), ("The answer is B because ATP is made there. And that is all.", "B"), ("<answer>(A) the nucleus</answer>", None), ("Answer: A and C", None),
    ("Option A is correct and option B is correct.", None), ("The answer is A. <answer>B</answer>", "B"),
    ("<answer>A</answer> Wait. <answer>C</answer>", "C"), (r"The answer is A. No: \boxed{D}", "D"),
    ('<answer>"B"</answer>', "B"), ("<answer>'B'</answer>", "B"), ("<answer>[B]</answer>", "B"), ("<answer>B;</answer>", "B"),
    ("<answer>B (the nucleus)</answer>", "B"), ("<answer>b. the nucleus</answer>", "B"), ("<answer>B.The nucleus.</answer>", "B"),
    ("<answer>B (mitochondria)</answer>", None), ("<answer>a. nucleus</answer>", None), ("The answer is B. Yes, the answer is B.", "B"), ("Answer: The answer is C", "C"),
    ("<answer>D (All of the above.)</answer>", "D"), ("<Answer>B</Answer>", "B"), ("Thus, option B is correct.", "B"), ("Hence option B is the best answer.", "B"),
    ("The answer must be B.", "B"), ("The answer should be (C).", "C"),
    ("Option B: mitochondria", None), ("Answer: B. Mitochondria", None), ("Choice (B): a ribosome", None), ("Option B: the nucleus", "B"),
]


@pytest.mark.parametrize("response, letter", LETTERS)
def test_letters(response, letter):
    assert pick_letter(response, CHOICES) == letter


def test_letters_of_odd_choices():
    odd = ["15x + 15", "–15x + 18", "( 'a', 2 )", "isupper()"]
    for letter, text in zip("ABCD", odd):
        for form in (f"{letter}. {text}", f"{letter}\n{text}", f"{letter} ({text})", f"({letter}) {text}.", f"{letter} - {text}"):
            assert pick_letter(f"<answer>{form}</answer>", odd) == letter, form
    assert pick_letter("<answer>B</answer>", ["B", "A"]) == "B"  # a letter is a letter first
    assert pick_letter("<answer>7</answer>", ["7", "7", "8"]) is None and pick_letter("<answer>8</answer>", ["7", "7", "8"]) == "C"
    assert pick_letter("<answer>C. elegans</answer>", ["E. coli", "C. elegans", "yeast"]) == "B"
    assert pick_letter("<answer>Both A and B</answer>", ["x", "y", "Both A and B"]) == "C"
    assert pick_letter("<answer>C. Both A and B</answer>", ["x", "y", "Both A and B"]) == "C"
    assert pick_letter("<answer>J</answer>", list("qrstuvwxyz")) == "J" and pick_letter("<answer>K</answer>", list("qrstuvwxyz")) is None
    for choices in (["Correct", "Incorrect"], ["[]", "[1]"], ["Best", "Worst"], ["*", "+"]):  # one that looks like nothing
        for nothing in ("", "<answer></answer>", r"\boxed{}", "<answer>", "The answer is", "<answer>answer</answer>", "I do not know."):
            assert pick_letter(nothing, choices) is None
        assert pick_letter("<answer>A</answer>", choices) == "A"
    assert pick_letter(r"\boxed{$\frac{1}{2}$}", [r"\frac{1}{2}", "2"]) == "A"
    assert pick_letter("Answer: **B. Yes. No, the tag is short**", ["Yes, always", "Yes. No, the tag is short"]) == "B"
    assert pick_letter("Answer: **B. Yes. No, it is A**", ["Yes, always", "Yes"]) is None
    for choices, answer, letter in (
            (["(0,1)", "[0,1]", "(0,1]"], "B. (0,1)", None), (["(0,1)", "[0,1]", "(0,1]"], "A (0,1]", None), (["(0,1)", "[0,1]", "(0,1]"], "(B) [0,1]", "B"),
            (["MW", "W", "kW"], "mW", None), (["f'(x)", "2"], "f''(x)", None), (["12", "5"], r"\textminus 12", None), (["12", "5"], "-12", None), (['"a"', "a"], "A. a", None),
            (["0,1", "(0,1)"], "A (0,1)", None), ([r"\frac{1}{23}", "2"], r"\frac{12}{3}", None), (["f(x)", "F(x)"], "A. F(x)", None), (["a*b", "c"], "ab", None),
            (["'abc'", "abc"], "A. 'abc'", "A"), (["5 kg", "6 kg"], r"5\text{ kg}", "A"), ([r"\sqrt{2}", "2"], r"\text{\sqrt{2}}", "A"), (["2", "3"], r"\boxed{B}", "B")):
        assert pick_letter(rf"\boxed{{{answer}}}", choices) == letter, answer


SHORT_EQUAL = [  # answer, gold
    ("paris", "Paris"), ("The mitochondria.", "mitochondria"), ("free market economy", "Free-market economy"), ("Yes", "yes"),
    ('"Hamlet"', "Hamlet"), ("an increase in demand", "Increase in demand"), ("9.8 m/s^2", "9.81 m/s^2"), ("9.81", "9.81 m/s^2"),
    ("9.81 m/s^2", "9.81"), ("9.8 \\text{ m/s}^2", "9.81 m/s^2"), ("25%", "0.25"), ("0.25", "25%"), ("25", "25%"),
    ("3 x 10^8 m/s", r"3.0 \times 10^8 m/s"), ("1.5e-3 mol", "0.0015 mol"), ("5 meters", "5 m"),
    ("60 miles per hour", "60 mi/h"), ("2x", "x*2"), ("$1,200", "1200 dollars"), ("1,945", "1945"),
    ("-3.0", "-3"), (r"\frac{\pi}{2}", "1.57"), ("12.5 kJ", "12.6 kJ"), ("{1, 2}", "2, 1"), ("x = 4", "4"), ("25 °C", "25"),
    ("7.0 N", "7 N"), ("1200 J", "1200.4 J"), ("$1.5 million", "$1,500,000"), ("5 million people", "5,000,000"),
    ("≈ 2.87 m/s", "2.87 m/s"), (r"v \approx 2.87\text{ m/s}", "2.87 m/s"), ("approximately 2.87", "2.87"), ("about 2.86", "2.87"),
    (r"\text{H}_2\text{SO}_4", "H2SO4"), (r"\text{C}_6\text{H}_{12}\text{O}_6", "C6H12O6"), (r"\mathrm{Na}_2\mathrm{CO}_3", "Na2CO3"),
    ("Ca²⁺", r"\text{Ca}^{2+}"), ("Cl⁻", "Cl^-"), ("Na^{+}", "Na⁺"), ("Mean-squared error", "mean squared error"), ("5 nanometers", "5 nm"), ("5 kilojoules", "5 kJ"), ("3 Days", "3 days"), ("25 degrees Celsius", "25 °C"),
]
SHORT_DIFFERENT = [
    ("London", "Paris"), ("", "Paris"), ("", ""), ("no", "on"), ("dog bites man", "man bites dog"),
    ("mitochondria and nuclei", "mitochondria"), ("not mitochondria", "mitochondria"), ("9.8 m/s", "9.81 m/s^2"), ("5 cm", "5 m"),
    ("5 kJ", "5 J"), ("5 mol", "5 g"), ("9.6", "9.81"), ("0.25%", "25%"), ("2.5", "25%"), ("1939", "1945"), ("1944", "1945"), ("-5", "5"),
    ("3e7 m/s", "3e8 m/s"), ("x+1", "x-1"), ("2.001x", "2x"), ("0.001", "0"), ("5", "Paris"), ("Paris", "5"), ("1, 2", "1"),
    ("approximately 3", "3"), ("2 about 2.87", "2.87"), ("not about 2.87", "2.87"), (r"\text{H}_2\text{O}_2", "H2O"), ("6 or 7", "6"), ("C++", "C"), ("35", "3.5"), ("101", "100"), ("100 J", "102 J"), ("Na⁺", "Na"), ("Fe³⁺", "Fe^{2+}"), ("true", "false"), ("46.6", "46"), ("$20,000 gain", "$20,000 loss"),
    ("10% increase", "10% decrease"), ("$1.5 million", "$1.5 billion"), ("5", "5 million"), ("3 years", "3 days"), ("25 degrees Celsius", "25 °F"),
]


@pytest.mark.parametrize("answer, gold, right", [(*pair, True) for pair in SHORT_EQUAL] + [(*pair, False) for pair in SHORT_DIFFERENT])
def test_short_answers(answer, gold, right):
    assert same_short(answer, gold) is right


@pytest.mark.parametrize("answer, gold", rows(ACCEPTED_SHORT))
def test_accepted_short_answers(answer, gold):
    assert same_short(answer, gold)


HOSTILE = r"""
'{' * 10**5 + '1' + '}' * 10**5, '1' * 10**6, '9**9**9', '9^9^9', '5^{5^{5^{5^5}}}', '10^{99999999999}', '10^{-99999999999}', '1e999',
'(' * 480 + '1' + ')' * 480, '(1,' * 240 + '1' + ')' * 240, '-' * 990 + '1', '1' * 990, '0.' + '1' * 900, '^'.join(['2'] * 480),
'±1' * 400, '1±2±3±4', ','.join(['1'] * 480), '*'.join(['9^{300}'] * 100), 'x^{y^{z^{x^{y}}}}', '(x+1)^{9000}', '0^{-1}', r'\sqrt[0]{2}',
'+'.join(f'1/{i}^{{90}}' for i in range(100, 180)), '5 ' + 'apples ' * 140 + '!', '5' + 'abcdefgh' * 120 + '!', '5' + ' ' * 900 + '!',
r'\text{' * 150, r'\begin{pmatrix}' * 60, '=' .join('x' * 450), '1,000' * 190, '1' + ',000' * 240, '|' * 990, r'\sin' * 240,
r'\sqrt' * 190, r'\frac' * 190, '_' * 900, '^{' * 400, '1 1/2 ' * 150, '²³√∅' * 200, r'\infty-\infty', '#' * 900, chr(92) * 999,
'1e99999999 m', '5e-99999', 'A' * 10**6, '\n' * 10**6, r'\boxed{' * 150000, r'\boxed' + ' ' * 10**6, r'\boxed{' + chr(92) * 10**6,
'<answer>' * 150000, '<answer>' + 'the ' * 250000 + '</answer>', '<answer>B. ' + 'or ' * 300000 + '</answer>', 'answer is ' * 100000,
'<answer>B. x or' + ' ' * 10**6 + '</answer>', r'\boxed{5}' + ' and' * 50 + r' X\boxed{6}', '(' + 'x ' * 330 + '+(1 ' + 'm2' * 27 + ' mm',
' $' * 10**5 + r'\boxed{1}' + '$ ' * 10**5 + '-',  'answer: A\n' * 100000, 'option A is ' * 100000, 'option A is' + ' ' * 10**6,
r'\boxed{5}' + ' **' * 300 + r' X\boxed{6}', r'\boxed{5}' + '** ' * 300 + r'X\boxed{6}', '- **' * 250 + r'\boxed{5}' + '**' * 400, '\n- *' * 400 + r'\boxed{5}',
'---\n' * 300 + r'\boxed{5}', ' ' * 10**5 + '- ' * 10**5 + r'\boxed{5}', '_{α' * 300, 'α_' * 450, '_1' * 450 + 'α', r'\theta' * 150, r'\sinθ' * 190,
'answer' + ' ' * 10**6, 'answer:' + '*' * 10**6, 'the ' * 250000, 'because ' * 100000
"""


def test_hostile_answers_take_bounded_time_and_memory():
    """All of them together need seconds; a hang would be ended by the timeout. They are wrong, and raise nothing."""
    program = fr"""
import resource
from {graders.__name__} import final_answer, pick_letter, same_math, same_short
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in ({HOSTILE.strip()}):
    answer = final_answer(text)
    final_answer(r'\boxed{{' + text + '}}')
    for gold in ('7', r'\frac{{1}}{{2}}', text[:990] + '7'):
        assert not same_math(answer, gold), (text[:50], gold[:50])
        assert not same_short(answer, gold) or '.1' in gold, (text[:50], gold[:50])  # 0.1117 is about 0.111
    for response in (text, 'The answer is ' + text, '<answer>' + text + '</answer>'):
        pick_letter(response, ['one', 'two'])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    folder = graders.__file__.rpartition("/")[0]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 200  # MiB
