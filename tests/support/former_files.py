"""Files of genomes as versions to date have written them, in base85, with digests of what they hold."""

FORMER = {
    "conv float16": (
        "31843ae1c5e68446",
        59,
        "NCE%=00000dm>+7ZDn*}WMOn+Utc0Rdm?6Ua&2LBB03^xVrF%2V=ZT8Zf|X6Eixi3B5rkUVr6o3B03^wY;R$7F*YJBB5-VBZX!A&"
        "V?952YgINlWp;TaEkH{&GB9aADtlElWMD>bW>G&icVl@!XH+t9X-Q*Na&&8SP)J}+B{DxUdQCw{b5~e2Y-n_KbW(VFJZwxTa!X`k"
        "P%A55DpEW|esViyCVDtUD`+t=aXfT*ePlC6LSj%uCVO&bKS^S1PhvqqV{T3*a41ARQY&UsFeo^8c0pxmcW6L0c}Yekcr;cacsn^o"
        "BqmogPikjzDm7(CIa5eLFn2jCcXV`AXje;ULO4ibNIrEjDql@|Lq1k<T4GIkXM8|<F+f&HNlqz7H(*L|Q9@&Jcr|lCIX+2fdSG`s"
        "cxrk#Ur1qLAtEdyb7)~QH8vtTA~P~JH8x{rWHn_mWHd2iH8W;1VK-rBI5TE6G&5v3W;bRsVlibiVK6u`VL4+nVq#=8WM*VJHD)no"
        "Vl!hlGa`K~B57`PHZ&qSdm?0Xd2nSSIwDCnG$Je_b7*03Wg<FTF<mSoWMOn+UvFk+b7gdMB05_zEI3_#EFxxXZ((#ZG9o&AB4l)V"
        "aAhJoB1SVZA}k_vXkl<=B05_*T`VGGVRT_%Z)Rq5Wpr~QI$Jm_G%#I#EFxxXZ((#XHX=HEB4l)VaAhJoB1SPbA}k_vXkl<=B05_&"
        "IbAFwWMOn+UvFk+b7gdMB05_%Ff1`OI9+{xARr(h000000000000000000000000000000004kL004kL004kL004kL0000000000"
        "06YLZ06YLZ9vt$h^`=22?kk(Ew=V5G(Xm%MSiPDo=dlpJO*;@Yin&R*Z9r1Iyg17_mbE*$gt@9aD7_LzIz$UY#YM@za6rK}95lwj"
        "3b+_NHarO?v_0u5dA(*e3p|WGxIAq-m@%>~>9_",
    ),
    "conv int6": (
        "495adc4d445d7351",
        59,
        "NB{r;00000dm?9IW_503EoWtJZ*65QGa@>BB4l)VaAhJoB2_pdEFyDgVQ^(4I$JX^I9)6vWMOn+UvFk+b7gdMB05_zEHf}TU44BZ"
        "jsUrv_|#Z5Qa`-o4-RLc7PVG64#O}E`%7n|kR|$hOo#4S+bw^ugA}L_C3c3c24N5qDRN@D>LOWdistryF0cHQS9+oUsmAW{rPB}e"
        "k>hXN8+p@6eJN6Rb^gH)26L^pVQ2k(&qWsHK84EDrK(`kx76C`nJt_PlvpV8xa8uZOK@TmtI+R7T;hjh3bgdU2jihwu$qlWZi%vS"
        "4MHFfVM@VyiXDGx`2^L1WyaWhlQPg^=7-vY<^VJmKaZ1=v92Eg000000001hKY%}gKY%{~00000000000000000000JODfZJODf%"
        "9P+63ra>g`E1RviE+##4J-a=XJ-Iv@J()bXJcsvq0jAdimyS#FB$-4`s6aTnf8jUz<pHbj03YO(3x5OO+x|De",
    ),
    "tied None": (
        "40c672b1df0d00ac",
        30,
        "AOQdX00000dm>+7ZDn*}WMOn+Utc0Rdm?6Ua&2LBB03^xVrF%2V=ZT8Zf|X6Eixi3B5-VBZX!A&V?952YgINgPjF#)aYZdcVm>lI"
        "OJ;IBO*KevZCGMFK~phuV|-S5ZgzAvK`=l?Gb(3KOj%ALR!2E7M=B*VVKYE!JxVlTUQAVLF+ngpCO2y`NmNZoV`NKxeLW&9B6DbA"
        "GBq|LIwEE;GG=2pWH~fsWMeU8I5=fwFk~`eGcjdhH)JqoVKy`|H!(3aHZ)^nGc`0}H#lK9I5RXfFlA+7H8nP4HZ&rAEFxxXZ((#Z"
        "G9o&AB4l)VaAhJoB1SVZA}k_vXkl<=B05_$FkLJnWMOn+UvFk+b7gdMB05_zEHN@LU44BZl(gQy)eH_lA+bZh^l^2+S<}%z;7~0;"
        "zPJFtZsDaqKP;8KZ+kvJuD^pnHH96&K1;toxh)|-#9z8UUB)p!0oO>p>4e}uP{SC&8aDyIwef;KDYJ$@^2?jPDnz@zxx>-D3wMb>"
        "g5PRCP%H{Rnv<2k_b?2<",
    ),
    "tied int2": (
        "d047b7459d689aa3",
        30,
        "NB{r;00000dm?9IW_503EoWtJZ*65QGa@>BB4l)VaAhJoB2_pdEFyDgVQ^(4I$Jq2T`VGGVRT_%Z)Rq5Wpr~QI$JO-IWt{-eIOtp"
        "C_F#~@L>2W00ppLJ@}}25+fpVF-im@f^9qO0S-)unBiinV-|}wr6T22P<0Q}8LNYl2T;NcXdX0H42=vd4b2VA42_Hp%#6*T;TKyA"
        "08T%XKS(HA8(J@`<^",
    ),
    "shared int8": (
        "57b4c83e1abb939e",
        134,
        "NB{r;00000dm?9IW_503EoWtJZ*65QGa@>BB4l)VaAhJoB2_pdEFyDgVQ^(4I$Je3HeD<tWMOn+UvFk+b7gdMB05_zEHyYbU44BZ"
        "Zx@}@Eq>E5oO#@n5<`T|810t9PQx$|ME`|jg(A;-z25X+qMnKbf<`JJ^}@enHKYlNlelpYMMAmw;#t3)^~4G0MvX*wkAMEkix0lI"
        "3(fAr6z}`jr(KxKL-8DL@v(l{jUPbt$ko&g_xi@+Yr1B=QzJ?OCNb*IjcjXfCTniZmQVZ;?(Q$KAfyTfTdSTNr>Y^QMk1y(QVM%j"
        "Yb8~T8nON)%=B>hzN7J!%<9yiA7`QQKy%-V%Q#0}AYW=38fOs}tTb)Ipj_)im3YVjEhoV?XUCXOmI$RIRI!HHq6B*m(>5S%c5gZ?"
        "nZ#<3GhmS`SSaR}EV(5uivxLa!7g=d6?Tb*Pcq9w>wG!X$G3<p*KA&0mvZW^;>CXeW(Oc{6oB{(0f-v~Anq#wkrRNpuK+|&03s&<"
        "u|5Ei6M#q#!0PK8nX~t{SGUkN`>$mtUM4OzWv?bO000000000006YLZ06YLZ000000000006YLZ06YLZ00000000000000000000"
        "00000000000000000000nX~t{SGUkN`>$mtUM4OzWv?bO000000000006YLZ06YLZ000000000006YLZ06YLZ000000000000000"
        "0000000000000000000000000);#AjzdXJ?SUfR1DLkG#YCO?9S3DCui2&!j|2C$vf%5YD|MKzx@c)zPrkzok0Jr~uy#KsHL;$?L"
        "Wd8vE0RR90u>k)70093?fd2phRs#Qk{{R",
    ),
    "huffman int8": (
        "c4934b91787ed23e",
        4160,
        "NB{r;00000dm?9IW_503EoWtJZ*65QGa@>BB4l)VaAhJoB2_pdEFyDgVQ^(4I$Jq3HeD<tWMOn+UvFk+b7gdMB05_zEIBkbU44BZ"
        "Io_>a_ni~%(8Oeb^w`r-7{eX8Xfc943^BZEW}*YC@d$Yn$s1_CK-P^b9%^H20RR9100000000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000002Ay000000000000000000000000000000000000AxG>00000000000000000000000000000000000"
        "0JJ**000000000000000000000000000000000000E#>S0000000000000000000000000000000000000qIZZBPLe1TYtfA>Jg}"
        "goYs~vOvm{pu6IBh(w>%tiudHb^!nb02}}y0Dy08+qP}BZQHheZQHhO`?GD^w(ZllZQJ&LTL1t60000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000fVXYiwr#d;+qQjf+qP}{vu)e9?b)_%+xET<000000000000000000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "0002s<?in8?(RPB?(XjH&fVSJ-Q9h^ySux)yMK3gcXxO9+#LV_00000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000Kk(Z"
        "Ns{Duk|arzze$oLNq!|sk|g<&BuSD)5&!@I00000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000000000000000000000000000fG+",
    ),
    "conv int7": (
        "f7ac53ff6198b4c3",
        59,
        "M?y3=<_V86BR7v3;q5gT;A!&@&XlEtvrj@j*O};;5SQ)ITxV!Te8LAd_;EEL3@yy?Cw&t#5<Zp&o(ZZvh9yX{#+bUzA#G_S*8?jp"
        "P--_fhBSbbbWmID#^^SfgOfdS#czmS2b&O6^P5mm@yFt+7i(()0000000000fIomgfIomg0000000000000000000006YLZ06YLZ"
        "9vt$h^`=22?kk(Ew=T3jm!&#L{56v%auvQyaK2AWdw#uQ=)Xs3WMQXN3PJm<?Rah0khf-o{L=sdmKUk)*I<?v08}nqesBi",
    ),
    "tied int3": (
        "7a06c33e27c10e25",
        30,
        "M?y3+S#kqHBO;Gs^f8PGrW)+=1Z-qu1{1K1A*~s%gVDps2pdB^Lr~bn)&c+*ppOwAmVd}eWwK(?emnKNJ^",
    ),
    "lenet5 steps": (
        "fcf94e4419421580",
        492,
        "M?y3ijKtzr#hF14z#s?&KjZ-s(9ikznl`qn8nL8JAHZe~%!UNBV-}f2wJqLkE23!=)D8Tx(Z{Mi-)Q7daLADf$IH552ouG8oJ)o;ImX}$M?-"
        "=2A%UFchOh;LM;PFe;(91i`w53YO<qT3!HUBM(z5965|$=zu}vt|E_weH@By!DfW=eJ8vy`);pH0pQ&q1xjl_c(UZBF1S@2=t%=5hlxFJ3K_"
        "}*u@oQpcCBb_#?fb@>9k$$V}p*<(MvC;Y$uY(eeH|0xNKe{XS48vrt4iV!loHl#-lS}LBMG+VQJ)Ki(NDlVONLhhp_(%h9nqM-0dmoPwsx1M"
        "Lg>x~!naoHPrziuAH>A>*N<y&#V4n1M#qBS8<A(qKV?r;A>PA}Fglm>{if5d%uqAgz;OjK;s%wa~6*EI%63%G$);*z0zJkuZI<j_NASwS{9D"
        "NRhB>t%z!GI$`UseKY^uZSbfan8z^d?0S5~i2<)gh_qtpxpQj-kr3mqdR47!(N3GL^G`CA|*>Ru~xdUydGEdPO&$DpNNx<)3Hgw0f0w#z!E;"
        "@+wXsht@#(x0|2Nn5}zTePSmDuHz0yIu(8TZ!#t)JcOU61cnCHl?c0Kg2b`",
    ),
}
