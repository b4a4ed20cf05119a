"""Attacks on the graders of text: answers that are wrong, by class, and answers rewritten and spoilt by rules."""
import math
import random
import re

import pytest

from eval import same_math, same_short

# Attacks that once paid, by class: an answer, then gold ones that it is not. Judged as mathematics and as short answers.
REFUSED = {
    "words that change the meaning after a number, or stand for it": r"""
20\% increase ¦ 20\% ¦ 20\% decrease
20% decrease ¦ 20% ¦ 20% increase
5 miles north ¦ 5 miles ¦ 5 miles south ¦ 5
\$500 profit ¦ \$500 ¦ \$500 loss ¦ 500
a loss of \$500 ¦ \$500
5 squared ¦ 5 ¦ 25
5 cubed ¦ 5
5 factorial ¦ 5
5 tenths ¦ 5
5 halves ¦ 5
5 below zero ¦ 5
5 percent less ¦ 5 ¦ 5\%
5 or so ¦ 5
5 times ¦ 5
5 more ¦ 5
5 dozen ¦ 5
5 bits less ¦ 5
5^{\text{th}} ¦ 5
5th ¦ 5
5 \text{ mod } 7 ¦ 5
5 \pmod 7 ¦ 5
5 (approximately) ¦ 5
5, approximately ¦ 5
5 remainder 2 ¦ 5
5 AM ¦ 5 PM ¦ 5
5 BC ¦ 5
minus 5 ¦ 5
negative 5 ¦ 5
about 5 ¦ 5
at least 5 ¦ 5
more than 5 ¦ 5
not 5 ¦ 5
no 5 ¦ 5
one half ¦ 1
two thirds ¦ 2
twenty-five ¦ 25 minus ¦ 20
five hundred and six ¦ 5
\text{no more than } 5 ¦ 5
\text{not }5 ¦ 5
5\text{ or less} ¦ 5
5\text{ is wrong} ¦ 5""",
    "ranges, dates and scores": r"""
1900-1904 ¦ 1914-1918 ¦ -4
1900–1904 ¦ 1914–1918
10-20 ¦ 15-25 ¦ -10
3-2 ¦ 5-4 ¦ 1
2020-01-05 ¦ 2014 ¦ 2021-01-06
555-1234 ¦ -679
1.5-2.5 ¦ 2.5-3.5
5-10 km ¦ 15-20 km ¦ -5 km
(1900-1904) ¦ 1914-1918
x=1900-1904 ¦ 1914-1918
1/2/4 ¦ 1/8 ¦ 2
9:30 ¦ 3:10
1.2.3 ¦ 1.23""",
    "a tolerance that nobody gave": r"""
5.0 ¦ 5.04!
1945.0 ¦ 1940
x=1944 ¦ 1945
(1944) ¦ 1945
\frac{3889}{2} ¦ 1945
1944.9 ¦ 1945
194.49*10 ¦ 1945
1.9449e3 ¦ 1945
0.333 ¦ \frac13 ¦ 1/3
3.14 ¦ \pi
3.14159265358979 ¦ \pi
1.4142135623730951 ¦ \sqrt{2}
\frac{14142135623}{10000000000} ¦ \sqrt{2}
1.41421356237309504880168872420969807857 ¦ \sqrt{2}
\frac{355}{113} ¦ \pi
\frac{312689}{99532} ¦ \pi
\sqrt[18]{888582403} ¦ \pi
\sqrt[9]{\sqrt{888582403}} ¦ \pi
\frac{665857}{470832} ¦ \sqrt2
\frac{\ln(640320^3+744)}{\sqrt{163}} ¦ \pi
e^{\pi\sqrt{163}} ¦ 262537412640768744
\tanh 20 ¦ 1
\tanh(9)+0 ¦ 1
\cos(10^{-9}) ¦ 1
\cos 0.00001 ¦ 1
\sqrt{2}+10^{-20} ¦ \sqrt{2}
\sqrt{2}(1+10^{-15}) ¦ \sqrt{2}
1.0000000001\pi ¦ \pi
\sqrt{1.99999999999999} ¦ \sqrt{2}
e^{0.000000000001} ¦ 1
2.5x ¦ 2.51x
100.4 ¦ 100""",
    "units as a bag of letters": r"""
5 m^2/s ¦ 5 m/s^2
5\text{ m}^2/\text{s} ¦ 5\text{ m/s}^2
5\text{ s}^{-1} ¦ 5\text{ s}
5 s^-1 ¦ 5 s
5\text{ m}^2 ¦ 5\text{ m}^3 ¦ 5\text{ m}
5 MW ¦ 5 mW
5\text{ MW} ¦ 5\text{ mW}
5\text{ mg} ¦ 5\text{ Mg}
5\text{ m} ¦ 5\text{ M}
5\text{ kg m} ¦ 5\text{ kg/m}
5 g ¦ 5 G
5 pF ¦ 5 PF
5 nm ¦ 5 N m
5 ms ¦ 5 m/s ¦ 5 Ms
5 J/K ¦ 5 K/J
5 mol/L ¦ 5 L/mol
5 kJ ¦ 5 J
5 °C ¦ 5 °F ¦ 5 K
5\text{ cm} ¦ 5\text{ m}
5 km/h ¦ 5 m/s
5 V ¦ 5 A
5 square meters ¦ 5 meters
5 per second ¦ 5 seconds
5 hours ¦ 5 days
50 cents ¦ 50 dollars
5 euros ¦ 5 dollars
\$5 ¦ 5 cents
5 people ¦ 5 students
0.2\% ¦ 0.2 ¦ 20\%
0.5 ¦ 0.5\%
50\% ¦ 0.05
5000 ¦ 5\text{ km}
5\text{ km} ¦ 50\text{ m}""",
    "commands that the reader does not know": r"""
0.3\overline{6} ¦ 0.36
0.\overline{3} ¦ 0.3
0.\overline{36} ¦ 0.36
\overline{36} ¦ 36
\bar{36} ¦ 36
A\setminus B ¦ AB ¦ A B
A \to B ¦ AB ¦ A B
A \implies B ¦ A B
A \cap B ¦ A B ¦ A\cup B
A \times B ¦ A \cup B
p \land q ¦ pq
p \lor q ¦ pq
p \oplus q ¦ pq
\neg p ¦ p
\lnot p ¦ p
x \neq 3 ¦ x = 3 ¦ 3
\neq 5 ¦ 5
\sim 5 ¦ 5
\mathbb R ¦ R
\mathbb{Z} ¦ Z
\mathcal{O}(n) ¦ On
\hat{x} ¦ x
\vec{v} ¦ v
\dot{x} ¦ x
\tilde{5} ¦ 5
\underline{5} ¦ 5
\cancel{5} ¦ 5
\not 5 ¦ 5
\phantom{5} ¦ 5
\lfloor 5.5 \rfloor ¦ 5.5
\lceil 4.5\rceil ¦ 4.5
\sum 5 ¦ 5
\int 5 ¦ 5
\int x ¦ x
\partial x ¦ x
\prod_{i=1}^{5} 5 ¦ 5
\lim 5 ¦ 5
\det 5 ¦ 5
\max(5,6) ¦ (5,6)
\gcd(5,6) ¦ (5,6)
\begin{vmatrix}1&2\end{vmatrix} ¦ \begin{pmatrix}1&2\end{pmatrix}
undefined ¦ 0
undefined(0) ¦ 0
0\cdot\text{undefined} ¦ 0
DNE ¦ 0
\infty - \infty ¦ 0
0\infty ¦ 0
2\infty ¦ \infty
x^* ¦ x
A^T ¦ A
5 ? ¦ 5
5 @ 3 ¦ 15
5 # 3 ¦ 15
5 & 3 ¦ 15
5 | 10 ¦ 50
x \mid 5 ¦ 5x""",
    "what floats hide": r"""
x^{100}+x ¦ x^{100} ¦ x^{100}+2x
x^{100} ¦ x^{100}+1
x^{200}+5x+1 ¦ x^{200} ¦ x^{200}+5x
x^{50}+\sqrt{2}x ¦ x^{50}
x^{60}+\pi x+1 ¦ x^{60}+\pi x
x^{30}+10^{-9}x ¦ x^{30}
x^{1000} ¦ x^{1000}+1 ¦ x^{1001}
(x+1)^{40} ¦ (x+1)^{40}+1
\frac{x^{90}-1}{x-1} ¦ x^{89}
\sqrt{x^{40}+1} ¦ x^{20}
10^{400} ¦ 10^{401}
10^{1000} ¦ 10^{2000}
2^{10000} ¦ 3^{10000}
e^{1000} ¦ e^{2000} ¦ \infty
e^{e^{e^{10}}} ¦ e^{e^{e^{11}}}
1000! ¦ 1001!
e^{-1000} ¦ 0
10^{-300} ¦ 0
2^{-2000} ¦ 0
1/0 ¦ 2/0 ¦ \infty
\tan 90^\circ ¦ 10^{1000} ¦ \infty
\frac{0}{0} ¦ 1 ¦ 0
0^{-1} ¦ 0
\ln 0 ¦ -\infty""",
    "letters that are words or names": r"""
ACB ¦ ABC
BA ¦ AB
CBA ¦ ABC
BAC ¦ ABC ¦ CAB
tea ¦ eat
no ¦ on
was ¦ saw
god ¦ dog
abac ¦ baca
TTH ¦ THT
HHT ¦ HTH
AaBb ¦ aabb ¦ AABB ¦ bBaA
Rr ¦ RR ¦ rr ¦ rR
CO ¦ Co ¦ OC
NO2 ¦ No2 ¦ N2O
CO2 ¦ C2O ¦ CO3 ¦ CO
Mg ¦ mg
t ¦ T
AB^2 ¦ (AB)^2
GATTACA ¦ GATACAT""",
    "names, conditions and alternatives": r"""
(y,x)=(1,2) ¦ (1,2) ¦ (x,y)=(1,2)
(b,a)=(3,4) ¦ (3,4)
(x,y)=(2,1) ¦ (x,y)=(1,2)
(x,y,z)=(1,2) ¦ (1,2,3)
x=2, y=3 ¦ x=3, y=2
x=1, y=2 ¦ 1,2 ¦ 2
x = 3, y = 5 ¦ 5 ¦ 3
x=5 \text{ if } y>0 ¦ 5
x=5 \text{ or } 6 ¦ 6 ¦ 5
x=5 \text{ or } x=6 ¦ 6 ¦ 5
x=2y=10 ¦ 10
x=y=5 ¦ 5
3=5 ¦ 5
0=5 ¦ 5
5x=25 ¦ 25 ¦ 5
2x=10 ¦ 10 ¦ 5 ¦ x=5
x+3=10 ¦ 10 ¦ 7
x^2=25 ¦ 25 ¦ 5
-x=5 ¦ 5
4=2+2=5 ¦ 5
y\neq 0, x=5 ¦ 5
5, y=6 ¦ 6
n = 4 \text{ when } m = 5 ¦ 5
x=5 ¦ y=5
f(x)=5 ¦ f(y)=5
x=5, n\in\mathbb{Z} ¦ 5
y=2x+3 ¦ y=2x-3 ¦ x=2y+3
2x+4y=6 ¦ x+2y=6
x^2+y^2=25 ¦ x^2+y^2=5 ¦ 5
wrong=5 ¦ 5
loss=5 ¦ 5
12/7 \approx 1.71 ¦ 1.71!
\frac{12}{7} \approx 3 ¦ \frac{12}{7}
5 \approx 6 ¦ 5 ¦ 6
\approx 5 ¦ 5""",
    "relations and intervals": r"""
x \le 3 ¦ x<3 ¦ 3
x > 3 ¦ x < 3 ¦ x\geq 3 ¦ y > 3
x > 3 ¦ (-\infty,3) ¦ [3,\infty)
(1,2) ¦ [1,2] ¦ (1,2]
1<x<2 ¦ [1,2] ¦ 1<y<2 ¦ 1<x\le 2
1<x<3 ¦ (1,2)
2x<10 ¦ x<5
x<5 ¦ 5
x<5, x>3 ¦ (3,5)
x^2<4 ¦ (-2,2)
x<-8 \text{ and } x>8 ¦ (-\infty,-8)\cup(8,\infty)
x+y<5 ¦ x+y>5 ¦ x+y\le 5
-x-y<5 ¦ x+y<5
1<x>2 ¦ (1,2)
\{x | x>3\} ¦ (-\infty,3)
(1,2)\cap(3,4) ¦ (1,2)\cup(3,4)
(1,2)\cup(3,4) ¦ (1,2),(3,4)
[1,2] ¦ \{1,2\}
x \in \{1,2\} ¦ (1,2)""",
    "lists and readings in doubt": r"""
1, 2, \ldots, n ¦ 1,2,n
1,2,3,... ¦ 1,2,3
1,2 ¦ 1,2,2
1,1,2 ¦ 1,2
5 or 6 ¦ 5 and 7 ¦ 5
men or women ¦ men and women
1/2x ¦ \frac{1}{2x} ¦ \frac{x}{2}
\sin x/2 ¦ \sin(x/2) ¦ \frac{\sin x}{2}
2^3^2 ¦ 512 ¦ 64
5!! ¦ 15 ¦ 120
--5 ¦ 5
5 5 ¦ 25 ¦ 55
x2 ¦ 2x
|x| ¦ x
\sqrt{x^2} ¦ x
x^{12} ¦ x^1 2
\sin^{-1} x ¦ \frac{1}{\sin x}
\log x ¦ \ln x
\log_2 8 ¦ \log_8 2 ¦ 8
\pm 5 ¦ 5 ¦ -5""",
    "a question's formula where a number was asked for": r"""
1002^2-502^2+298^2-202^2 ¦ 800000
(u+4)(u-1)-(u-3)(u+6) ¦ 14
(x+1-x)! \div (x-x+1)! ¦ 1
\frac{7!+8!}{6!+7!} ¦ \frac{63}{8}
\sqrt{5+\sqrt{21}}+\sqrt{5-\sqrt{21}} ¦ \sqrt{14}
182+3\cdot 7-64\div 2+27\div 3 ¦ 180
2^{(2^3)}-\left(2^2\right)^3 ¦ 192
\cos^3 \frac{2\pi}{7}+\cos^3 \frac{4\pi}{7}+\cos^3 \frac{8\pi}{7} ¦ -\frac12
\tan 9^\circ+\cot 9^\circ-\tan 27^\circ-\cot 27^\circ ¦ 4
\frac{\csc\theta}{\sin\theta}-\frac{\cot\theta}{\tan\theta} ¦ 1
\sin^2 x+\cos^2 x ¦ 1
\frac{x}{x} ¦ 1
1+2+3+4+5 ¦ 15""",
    "what a second round of attacks tried": r"""
x+y=x+y ¦ x+2y=3
x-x+y-y=0 ¦ x+2y=3
0x+0y=0 ¦ x+2y=3
$5$$6$ ¦ 56
\(5\)\(6\) ¦ 56
$5$6 ¦ 56
ABC ¦ abc
XYZ ¦ xyz
|xy| ¦ xy
|abc| ¦ abc
|4x+5| ¦ 4x+5
|9c+6| ¦ 9c+6
|3-2a| ¦ 3-2a ¦ 2a-3
\frac{12}{7}\% ¦ \frac{12}{7}
12\pi\% ¦ 12\pi
(4x+5)\% ¦ 4x+5
|xyz| ¦ xyz
\sqrt{x^2y^2} ¦ xy
f(x+y) ¦ f(x)+f(y)
g(2) ¦ 2g
e^{-1000} ¦ 0
5\right.6 ¦ 56
5\left.6\right. ¦ 56
5\mathbf{}6 ¦ 56
5{}6 ¦ 56
1.5.6 ¦ 1.56
5^{\circ}6 ¦ 56
5\text{}6 ¦ 56
5\hspace{1cm}6 ¦ 56
5\\6 ¦ 56
5\displaystyle6 ¦ 56
x<y ¦ y<x
f \circ g ¦ g \circ f ¦ fg
\arctan(2)° ¦ \arctan(2)
\sin( 30^\circ ¦ \frac12
9.8*10\% ¦ 9.8*10
-five ¦ 5 ¦ five
≈five ¦ 5
>=3 ¦ 3
x>=<3 ¦ 3
1.4142135623730951x ¦ \sqrt{2}x
\exp(-40) ¦ 0
100 ¦ 0,100
\pm 1 \pm 2 ¦ 3,-3
x+y<x+y ¦ x<y
2 \mid 4 ¦ 24
5\text{ km }\text{or more} ¦ 5\text{ km}
a=5,b=6 ¦ a=6,b=5
1,000 ¦ 1,0,0,0
1,000 ¦ 1,0
1.000 ¦ 1000
1'000 ¦ 1000
10^3 m ¦ 1000 km
5 km^2 ¦ 5000000 m
1 h ¦ 60 s
5\cdot\% ¦ 5
(5 ¦ 5
[5) ¦ 5
\{5 ¦ 5
5\} ¦ 5
<5> ¦ 5
5< ¦ 5
x>5 ¦ 5<x<6
\infty ¦ -\infty
+\infty, -\infty ¦ \infty
(−∞,5) ¦ (−∞,5]
5 \text{ (mod 7)} ¦ 5
5i ¦ 5j
5\%\% ¦ 5
5°° ¦ 5
°5 ¦ 5
\sin 30 ¦ \frac12
\sin(30) ¦ 0.5
\cos 60 ¦ 0.5
\log 8 ¦ 3
\ln 10 ¦ 1
\binom{5}{2} ¦ \frac52
5_2 ¦ 5
x_2 ¦ x2
x' ¦ x
x'' ¦ x'
-(-5) ¦ -5
\sqrt{-4} ¦ -2
\sqrt[3]{-8} ¦ 2
(-8)^{1/3} ¦ 2
i^2 ¦ 1
e^{i\pi} ¦ 1
\arcsin 2 ¦ 2
\frac{x^2}{x} ¦ x^2
\frac{d}{dx}x^2 ¦ x
2^{-3} ¦ -8
3!! ¦ 3
5+-3 ¦ 2
2 pi ¦ 2 pie
π ¦ p
red, white ¦ red and blue
neither ¦ either
Paris, France ¦ Paris
Paris or London ¦ Paris
not Paris ¦ Paris
paris ¦ parish
increases ¦ decreases
increase ¦ decrease
acid ¦ base
endothermic ¦ exothermic
true ¦ false
yes and no ¦ yes
12 ¦ twelve thousand
two ¦ 2 or 3
3 ¦ three hundred
25 ¦ twenty
0.055 ¦ 5.5
-9.8 ¦ 9.8
9.8 i ¦ 9.8
9.8x ¦ 9.8
9.8, 9.9 ¦ 9.8
9.8-9.9 ¦ 9.8
9.8 \pm 0.1 ¦ 9.8
9.8 m ¦ 9.8 s
9.8e1 ¦ 9.8
9.8e-1 ¦ 9.8
9.8*10 ¦ 9.8
>9.8 ¦ 9.8
x>9.8 ¦ 9.8
9.8+ ¦ 9.8
~9.8 J ¦ 9.9 W
980\% ¦ 9.8 J
9.8 eV ¦ 9.8 J
9.8 kg ¦ 9.8 g""",
    "what a third round of attacks tried": r"""
5%6 ¦ 5
²5 ¦ 25
5\!6 ¦ 56
5 units^2 ¦ 5 units^3
12 ways ¦ 12 apples
vitamin A ¦ vitamin
hepatitis A ¦ hepatitis
Group A ¦ Group ¦ A
x < 9.8 ¦ x < 9.81
(9.8, 2) ¦ (9.81, 2)
9.8, 2 ¦ 9.81, 2
5-10 km ¦ 15-20 km
\ln 5 ° ¦ \ln 5
x^2+y^2=9 ¦ x^2+y^2=3 ¦ x^2-y^2=9""",
    "far from zero, and functions that are no factors": r"""
|x-50| ¦ 50-x
|x-7000| ¦ 7000-x
\sqrt{(x-60)^2} ¦ 60-x
|x+y-200| ¦ 200-x-y
f'(x+y) ¦ f'(x)+f'(y)
f_1(x+1) ¦ f_1(x)+f_1
\sin 30° x ¦ \sin(30x°)
a_{2n} ¦ a_2n
a_{12} ¦ a_{1}2""",
    "a command that denies, taken for a name": r"""
\not= 5 ¦ 5
\ne = 5 ¦ 5
\nless = 5 ¦ 5
\log=5 ¦ 5
NOT = 5 ¦ 5
\not\in (1,2) ¦ (1,2)
\not\in\{1,2\} ¦ 1,2
\not\le 3 ¦ (-\infty,3]
x \ne 5 ¦ x = 5
≠ 5 ¦ 5""",
    "text commands that print a sign of their own": r"""
\textless{} 5 ¦ 5
\textminus{}5 ¦ 5
\textpm{}5 ¦ 5
5\textonehalf{} ¦ 5
5\textpercent{} ¦ 5
50\textcent{} ¦ 50 ¦ 50\text{ dollars}
\textasciitilde{}5 ¦ 5""",
    "a tilde that is no blank": r"""
~5 ¦ 5
x=~5 ¦ 5
(~5) ¦ 5
~p ¦ p
p \to ~q ¦ p \to q""",
    "sets of sets, braces, what is below a stroke": r"""
\{\emptyset\} ¦ \emptyset
\{\{1,2\}\} ¦ \{\{1\},\{2\}\} ¦ \{1,2\}
30^\circ} ¦ 30
8.314 J/mol K ¦ 8.314 J K/mol
5 J/(mol K ¦ 5 J/mol K
5 m/s s ¦ 5 m
5 meters squared ¦ 5 meters
1/2\frac13 ¦ \frac37 ¦ \frac16""",
    "a list that becomes one number, a decimal comma": r"""
5 and 280 ¦ 5280
5;280 ¦ 5280
5, and 280 ¦ 5280
12;345;678 ¦ 12345678
5,\$280 ¦ 5280
1280 ¦ 1 and 280
100200 ¦ 100;200
0{,}125 ¦ 125
0\,125 ¦ 125
0,\!125 ¦ 125
0{,}005 ¦ 5
1.5{,}000 ¦ 1.5""",
    "names inside": r"""
(y=1,x=2) ¦ (1,2) ¦ (x,y)=(1,2)
(x=1,x=2) ¦ (1,2)
\begin{pmatrix}y=1\\x=2\end{pmatrix} ¦ \begin{pmatrix}1\\2\end{pmatrix}""",
}


def rows(table: str) -> list[tuple]:
    return [tuple(line.split(" ¦ ")) for line in table.strip().split("\n")]


@pytest.mark.parametrize("kind, row", [(kind, row) for kind, table in REFUSED.items() for row in rows(table)])
def test_refused(kind, row):
    """An exclamation mark behind a gold one: as a short answer it may be within 1% of that."""
    answer, golds = row[0], row[1:]
    for gold in golds:
        gold, loose = re.sub(r"(?<=\.\d\d)!$", "", gold), re.search(r"\.\d\d!$", gold)
        assert not same_math(answer, gold), (kind, gold)
        assert loose or not same_short(answer, gold), (kind, gold)


def test_every_low_term_of_a_high_power_counts():
    """(x-3)^n against its terms, one of which is spoilt by 1."""
    rng = random.Random(2)
    for n in (8, 20, 30):
        coefficients = [(-3) ** k * math.comb(n, k) for k in range(n + 1)]
        terms = [f"{c:+d}x^{{{n - k}}}" for k, c in enumerate(coefficients)]
        assert same_math(f"(x-3)^{{{n}}}", "".join(terms))
        spoilt = rng.randrange(n + 1)
        terms[spoilt] = f"{coefficients[spoilt] + 1:+d}x^{{{n - spoilt}}}"
        assert not same_math(f"(x-3)^{{{n}}}", "".join(terms))


GOLDS = [r"\frac{12}{7}", "-5", "0.25", r"3\sqrt{3}", r"\frac{5\pi}{4}", "4x^2-6x+4", "(3,-3,1)", "-15+8i", "1,-3", "[-36,104]",
         r"\frac{2a+b}{2}", r"5\text{ km}", r"135\text{ square feet}", r"(-\infty,-8)\cup(8,\infty)", "2x+3y=7", "x>=4", r"2+\sqrt{7}",
         r"\frac{\sqrt{5}-1}{2}", r"\begin{pmatrix}1&-2\\3&4\end{pmatrix}", r"7z^{96}(4z+1)", r"\$6.50", r"60^\circ"]


@pytest.mark.parametrize("gold", GOLDS)
def test_rewritten_answers_are_right_and_spoilt_ones_wrong(gold):
    """By rules: other spellings of the same; one digit, sign, bracket, letter or unit changed, something left out or put behind."""
    fraction = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}")
    for same in (f"${gold}$", rf"\({gold}\)", f" {gold} . ", gold.replace("+", " + ").replace(",", ", "), rf"\displaystyle {gold}",
                 gold.replace(r"\frac", r"\dfrac"), fraction.sub(r"\1/\2", gold), gold.replace("-", "−"),
                 gold.replace("(", r"\left(").replace(")", r"\right)") if r"\infty" not in gold else gold):
        assert same_math(same, gold), same
    spoilt = {gold + " or 0", gold + r"\text{ or more}", r"\text{not } " + gold, r"\neg " + gold, gold + "!", gold + "^2", gold + "?",
              gold + r" \pm 1", gold + ", 17", r"\overline{" + gold + "}", gold + r"\ldots", "-" + gold, gold + "07"}
    for m in re.finditer(r"\d", gold):
        spoilt.add(gold[:m.start()] + str((int(m[0]) + 1) % 10) + gold[m.end():])
    for old, new in (("+", "-"), ("-", "+"), ("[", "("), (")", "]"), ("x", "y"), ("a", "c"), ("km", "m"), ("feet", "inches"), ("square ", ""),
                     (">=", ">"), (">=", "<="), (r"\sqrt", ""), (r"\pi", ""), (r"\cup", ","), (r"\infty", "9"), ("&", r"\\"), ("i", "j")):
        if old in gold:
            spoilt.add(gold.replace(old, new, 1))
    for wrong in spoilt - {gold}:
        assert not same_math(wrong, gold), wrong


def test_one_percent_of_what_was_measured_and_of_nothing_else():
    for gold in ("9.81", "-3.20", "1.5e-3", r"6.02\times 10^{23}", "12.5%", "4.18 J", "x = 2.50"):
        number = re.search(r"\d+\.\d+", gold)[0]
        for factor in (0.98, 0.991, 1.009, 1.02):
            answer = gold.replace(number, f"{float(number) * factor:.6f}")
            assert same_short(answer, gold) is (abs(factor - 1) < 0.01), answer
            assert not same_math(answer, gold)
    for gold in ("981", r"\frac{981}{100}", "9.81x", r"\sqrt{96}", "1945", "12%", "418 J", "(9, 8)"):
        number = re.search(r"\d+", gold)[0]
        for spelling in ("{}.4", "{}.0001", "\\frac{{{}00001}}{{100000}}"):
            assert not same_short(gold.replace(number, spelling.format(number), 1), gold), spelling
